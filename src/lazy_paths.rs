//! Which parameters of a module are lazy.
use burn::module::{Module, ModuleVisitor, Reparameterization};
use burn_memsave_layers::burn_internals::REPARAMETERIZATION;
use burn_memsave_layers::frozen::LazyWeight;
use burn_memsave_layers::visit::VisitPath;
use std::collections::BTreeSet;

/// The paths of the lazy parameters of a module.
pub(crate) fn lazy_paths(module: &impl Module) -> BTreeSet<String> {
    #[derive(Default)]
    struct Lazy {
        path: VisitPath,
        found: BTreeSet<String>,
    }
    impl ModuleVisitor for Lazy {
        fn enter_module(&mut self, name: &str, container: &str) {
            if (name, container) == (LazyWeight::NAME, REPARAMETERIZATION) {
                self.found.insert(self.path.joined());
            }
            self.path.enter(name, container);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.exit();
        }
    }
    let mut lazy = Lazy::default();
    module.visit(&mut lazy);
    lazy.found
}
