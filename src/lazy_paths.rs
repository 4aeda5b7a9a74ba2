//! Which parameters of a module are lazy.
use burn::module::{Module, ModuleVisitor, Reparameterization};
use burn_memsave_layers::burn_internals::REPARAMETERIZATION;
use burn_memsave_layers::frozen::LazyWeight;
use std::collections::BTreeSet;

/// The paths of the lazy parameters of a module.
pub(crate) fn lazy_paths(module: &impl Module) -> BTreeSet<String> {
    #[derive(Default)]
    struct Lazy {
        path: Vec<String>,
        found: BTreeSet<String>,
    }
    impl ModuleVisitor for Lazy {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            if (name, container_type) == (LazyWeight::NAME, REPARAMETERIZATION) {
                self.found.insert(self.path.join("."));
            }
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
    }
    let mut lazy = Lazy::default();
    module.visit(&mut lazy);
    lazy.found
}
