//! Lists the parameters of a module with what is needed to look them up in a file: paths, kinds and shapes.
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{Bool, DType, Int, Shape, Tensor};
use burn_memsave_layers::burn_internals::REPARAMETERIZATION;
use burn_memsave_layers::frozen::Recorded;
use burn_memsave_layers::visit::VisitPath;

/// The kind of a parameter's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ElementKind {
    Float,
    Int,
    Bool,
}

impl ElementKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Float => "float",
            Self::Int => "int",
            Self::Bool => "bool",
        }
    }

    pub fn accepts(self, dtype: DType) -> bool {
        match self {
            Self::Float => dtype.is_float() || matches!(dtype, DType::QFloat(_)),
            Self::Int => dtype.is_int() || dtype.is_uint(),
            Self::Bool => dtype.is_bool() || matches!(dtype, DType::U8 | DType::U32),
        }
    }
}

/// A parameter of the module.
pub(super) struct Target {
    pub path: String,
    /// The path without the names of enum variants, which other frameworks do not have.
    pub short_path: String,
    /// The types that it is in, outermost first, such as `Struct:Linear`.
    pub containers: Vec<String>,
    pub kind: ElementKind,
    /// The shape in a record.
    pub shape: Shape,
    pub rank: usize,
    pub reparameterized: bool,
}

/// Collects the parameters of a module, without initializing them.
#[derive(Default)]
pub(super) struct Targets {
    path: VisitPath,
    pub targets: Vec<Target>,
}

impl Targets {
    fn add(&mut self, kind: ElementKind, shape: Shape, rank: usize) {
        let no_variant = self.path.fields().filter(|(_, container)| !container.starts_with("Enum:"));
        let short_path = no_variant.map(|(name, _)| name).collect::<Vec<_>>().join(".");
        let (path, containers) = (self.path.joined(), self.path.containers().to_vec());
        self.targets.push(Target { path, short_path, containers, kind, shape, rank, reparameterized: false });
    }
}

impl ModuleVisitor for Targets {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == REPARAMETERIZATION
            && let Some(target) = self.targets.last_mut()
        {
            target.reparameterized = true;
        }
        self.path.enter(name, container);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // The shape in a record: the module may hold the parameter transposed.
        let shape = match param.is_initialized() {
            true => match Recorded::of(param) {
                Recorded::Value(value) => value.shape(),
                Recorded::Frozen(weight) => weight.shape(),
            },
            false => param.lazy_shape(),
        };
        self.add(ElementKind::Float, shape, D);
    }
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(ElementKind::Int, param.lazy_shape(), D);
    }
    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(ElementKind::Bool, param.lazy_shape(), D);
    }
}
