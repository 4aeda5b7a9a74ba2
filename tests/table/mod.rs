//! The table of all layers, which every check and every benchmark of a layer walks.
//!
//! **How it works.** A row says once how a layer is made, how it is called, on which shapes, and how many bytes ours keeps. It is written
//! in terms of a namespace `nn`, which stands for `burn::nn` and for `burn_memsave::nn` in turn. The macro [`row!`] turns it into a
//! [`Row`], which knows both twins by their types, and hands that to a [`Visitor`]. Each visitor is one check: kept bytes, peak and ledger
//! (`tests/memory/table_walk.rs`); outputs and gradients in every type (`tests/gradients/table_walk.rs`); conversions, configs,
//! displays and records (`tests/drop_in/convert.rs`); the paths of the namespace (`tests/drop_in/namespace.rs`); wgpu
//! (`tests/wgpu/table_walk.rs`); and the benchmarks, on the shapes of the README. The layer of ours that is checked is converted from
//! the stock layer. A visitor is compiled for every layer, so it does little: it hides the types behind closures, and leaves the rest to
//! functions that know only ranks.
//!
//! **How to add a row.** Write it in the file of its family, with its name, its shapes, the formula of the kept bytes (see [`kept`]), and
//! how it is made:
//!
//! - `config(device) |nn, shape| ..`: by a config whose `init` takes the device;
//! - `config()`: by a config whose `init` takes nothing;
//! - `config_one_way(..)`: by a config that names an activation;
//! - `module(..)`: the expression is the module itself.
//!
//! Add `forward |nn, layer, x| ..` if the call is not `layer.forward(x)`. Notes at the end of a row say what does not hold for it, and
//! why: see [`Notes`]. A variant that only tests need is `without(&[Check::Time], "as conv2d")`. A family is a file with a function
//! `visit` and a name in [`families!`], from which every walk has a test of that name. A layer without a row fails
//! `every_path_of_a_replaced_layer_leads_to_ours`. Smooth activations have a list of their own, see [`activations`].
//!
//! **How to run one row.** `MEMSAVE_ROW=softplus` leaves out all rows whose names do not contain it.
#![allow(dead_code, reason = "every walk uses its part")]
use burn::config::Config;
use burn::module::Module;
use burn::tensor::{DType, Device, Distribution, Tensor};
use std::env;
use std::fmt::Display;
use std::ops::Range;

pub mod activations;
pub mod attention;
pub mod closeness;
pub mod convolutions;
pub mod dense;
pub mod functions;
pub mod losses;
pub mod normalizations;
pub mod pools;
pub mod recurrent;
pub mod run;

/// Calls a macro with the names of all families of layers.
macro_rules! families {
    ($call:ident) => {
        $call! { activations, attention, convolutions, dense, functions, losses, normalizations, pools, recurrent }
    };
}
#[allow(unused_imports, reason = "benches are no tests")]
pub(crate) use families;

/// Visits the whole table.
pub fn visit(visitor: &mut impl Visitor) {
    macro_rules! visit_each {
        ($($family:ident),+) => {$($family::visit(visitor);)+};
    }
    families!(visit_each);
}

/// What is done with every row.
pub trait Visitor {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: Row<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>;

    /// The configs that the layers of a row are made of.
    fn configs<S, C>(&mut self, _name: &str, _stock: impl Fn() -> S, _ours: impl Fn() -> C)
    where
        S: Config + From<C>,
        C: Config + From<S>,
    {
    }

    /// The same for configs that name an activation, or a cell that does. Ours converts to Burn's, but not the reverse.
    fn configs_one_way<S: Config + From<C>, C: Config>(
        &mut self,
        _name: &str,
        _stock: impl Fn() -> S,
        _ours: impl Fn() -> C,
    ) {
    }
}

/// A layer and its twin.
pub struct Row<'a, const D: usize, const O: usize, S, M> {
    pub name: String,
    pub shapes: Shapes<D>,
    /// The bytes that ours should keep, as far as they grow with the batch.
    pub kept: Kept<'a, D>,
    pub stock: Twin<'a, D, O, S>,
    pub ours: Twin<'a, D, O, M>,
    pub notes: Notes,
}

/// The bytes that a layer keeps for an input.
pub type Kept<'a, const D: usize> = Box<dyn Fn(Case, Input<D>) -> usize + 'a>;

/// Makes a layer for a shape of the input.
pub type Init<'a, const D: usize, L> = Box<dyn Fn(&Device, [usize; D]) -> L + Sync + 'a>;

/// Calls a layer.
pub type Forward<'a, const D: usize, const O: usize, L> = Box<dyn Fn(&L, Tensor<D>) -> Tensor<O> + Sync + 'a>;

/// One side of a row. On our side, the layer gives the type and what a config makes. It has parameters of its own.
pub struct Twin<'a, const D: usize, const O: usize, L> {
    pub init: Init<'a, D, L>,
    pub forward: Forward<'a, D, O, L>,
}

/// Helps [`row!`]: types of closures are inferred in the order in which the closures are written.
pub fn init<'a, const D: usize, L>(
    _shapes: &Shapes<D>,
    init: impl Fn(&Device, [usize; D]) -> L + Sync + 'a,
) -> Init<'a, D, L> {
    Box::new(init)
}

/// See [`init`].
pub fn twin<'a, const D: usize, const O: usize, L>(
    init: Init<'a, D, L>,
    forward: impl Fn(&L, Tensor<D>) -> Tensor<O> + Sync + 'a,
) -> Twin<'a, D, O, L> {
    Twin { init, forward: Box::new(forward) }
}

/// See [`init`].
pub fn of_test<const D: usize, C>(shapes: Shapes<D>, config: impl Fn([usize; D]) -> C) -> impl Fn() -> C {
    move || config(shapes.test)
}

/// Hands a row to a visitor, see [the module](self).
macro_rules! row {
    // Without `forward`, the layer is called with its input.
    ($visitor:ident, $name:expr, $shapes:expr, $kept:expr, $make:ident ($($device:ident)?) |$nn:ident, $shape:pat_param| $new:expr
        $(, $note:ident ($($argument:expr),*))* $(,)?
    ) => {
        row!($visitor, $name, $shapes, $kept, $make ($($device)?) |$nn, $shape| $new,
            forward |$nn, layer, x| layer.forward(x) $(, $note ($($argument),*))*)
    };
    ($visitor:ident, $name:expr, $shapes:expr, $kept:expr, config $($rest:tt)+) => {
        row!(@of_config configs, $visitor, $name, $shapes, $kept, $($rest)+)
    };
    ($visitor:ident, $name:expr, $shapes:expr, $kept:expr, config_one_way $($rest:tt)+) => {
        row!(@of_config configs_one_way, $visitor, $name, $shapes, $kept, $($rest)+)
    };
    (@of_config $configs:ident, $visitor:ident, $name:expr, $shapes:expr, $kept:expr, ($($device:ident)?) |$nn:ident, $shape:pat_param| $new:expr,
        forward |$forward_nn:ident, $layer:ident, $x:ident| $forward:expr
        $(, $note:ident ($($argument:expr),*))* $(,)?
    ) => {{
        let (name, shapes) = (String::from($name), $shapes);
        let stock = $crate::table::of_test(shapes, |$shape| {
            use burn::nn as $nn;
            $new
        });
        let ours = $crate::table::of_test(shapes, |$shape| {
            use burn_memsave::nn as $nn;
            $new
        });
        $visitor.$configs(&name, stock, ours);
        row!($visitor, name, shapes, $kept, module ($($device)?) |$nn, $shape| $new.init($($device)?),
            forward |$forward_nn, $layer, $x| $forward $(, $note ($($argument),*))*)
    }};
    ($visitor:ident, $name:expr, $shapes:expr, $kept:expr, module ($($device:ident)?) |$nn:ident, $shape:pat_param| $new:expr,
        forward |$forward_nn:ident, $layer:ident, $x:ident| $forward:expr
        $(, $note:ident ($($argument:expr),*))* $(,)?
    ) => {{
        let shapes = $shapes;
        let stock = $crate::table::init(&shapes, |_device, $shape| {
            #[allow(unused_imports)]
            use burn::nn as $nn;
            $(let $device = _device;)?
            $new
        });
        let ours = $crate::table::init(&shapes, |_device, $shape| {
            #[allow(unused_imports)]
            use burn_memsave::nn as $nn;
            $(let $device = _device;)?
            $new
        });
        let row = $crate::table::Row {
            name: String::from($name),
            kept: Box::new($kept),
            stock: $crate::table::twin(stock, |$layer, $x| {
                #[allow(unused_imports)]
                use burn::nn as $forward_nn;
                $forward
            }),
            ours: $crate::table::twin(ours, |$layer, $x| {
                #[allow(unused_imports)]
                use burn_memsave::nn as $forward_nn;
                $forward
            }),
            shapes,
            notes: $crate::table::Notes::default()$(.$note($($argument),*))*,
        };
        $visitor.row(row)
    }};
}
pub(crate) use row;

/// Shapes of inputs: for tests; for benches the usual ones, which the README's table has; and small ones of a few thousand elements, where
/// the cost of a call shows.
#[derive(Clone, Copy)]
pub struct Shapes<const D: usize> {
    pub test: [usize; D],
    pub usual: [usize; D],
    pub small: [usize; D],
}

impl<const D: usize> Shapes<D> {
    /// The same with another shape in tests.
    pub const fn test(self, test: [usize; D]) -> Self {
        Self { test, ..self }
    }
    /// The usual shape, with a smaller batch if it has more than about a million elements.
    pub fn of_devices(self) -> [usize; D] {
        let [batch, rest @ ..] = self.usual.as_slice() else { return self.usual };
        let mut shape = self.usual;
        shape[0] = (1usize << 20).div_ceil(rest.iter().product()).min(*batch);
        shape
    }
    /// Only a shape for tests, for a row that is `without(&[Check::Time], ..)`.
    pub const fn only(test: [usize; D]) -> Self {
        Self { test, usual: test, small: test }
    }
}

/// Batch, sequence, features.
pub const ROWS: Shapes<3> = Shapes { test: [4, 32, 64], usual: [64, 128, 1024], small: [2, 8, 1024] };
/// Batch, classes.
pub const LOGITS: Shapes<2> = Shapes { test: [16, 40], usual: [128, 32_000], small: [16, 1024] };
/// Batch, sequence, features, for transformers.
pub const TOKENS: Shapes<3> = Shapes { test: [4, 32, 8], usual: [4, 512, 1024], small: [2, 16, 64] };
/// Batch, three times the heads, sequence, features of a head.
pub const QUERIES: Shapes<4> =
    Shapes { test: [2, 6, 9, 8], usual: [1, 24, 2048, 64], small: [2, 12, 16, 16] };
/// Batch, steps, features.
pub const STEPS: Shapes<3> = Shapes { test: [8, 6, 16], usual: [16, 64, 128], small: [1, 1, 128] };
/// Batch, channels, height, width.
pub const IMAGES: Shapes<4> = Shapes { test: [4, 8, 24, 20], usual: [16, 64, 56, 56], small: [2, 64, 7, 7] };
/// Images of twice the height and the width.
pub const LARGE: Shapes<4> =
    Shapes { test: [4, 8, 24, 20], usual: [16, 64, 112, 112], small: [2, 64, 14, 14] };
/// Batch, channels, length.
pub const SIGNAL: Shapes<3> = Shapes { test: [4, 8, 300], usual: [16, 64, 3136], small: [2, 64, 49] };
/// Batch, channels, depth, height, width.
pub const VOLUME: Shapes<5> =
    Shapes { test: [2, 4, 8, 10, 6], usual: [2, 32, 16, 28, 28], small: [1, 32, 4, 4, 4] };

/// A kind of check that walks the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Check {
    /// Kept bytes, peak and ledger.
    Bytes,
    /// Outputs and gradients on Flex and NdArray.
    Gradients,
    /// Conversions in both directions, displays, records.
    Conversion,
    /// Outputs and gradients on wgpu.
    Wgpu,
    /// The benches.
    Time,
    /// The bench of devices.
    TimeOnDevices,
}

/// Whether `MEMSAVE_ROW` names a row, or no row.
pub fn is_chosen(name: &str) -> bool {
    env::var("MEMSAVE_ROW").map_or(true, |part| name.contains(&part))
}

/// What is special about a row: most often what does not hold for it, and why.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    without: Vec<(Check, &'static str)>,
    inputs: Option<Range<f64>>,
    /// The relative precision that can be expected in f64.
    pub within: Option<f64>,
    /// Why other types cannot be compared.
    pub only_f32: Option<&'static str>,
    /// Why NdArray cannot be compared.
    pub not_on_ndarray: Option<&'static str>,
    /// What cancels out in a gradient, so that f32 has one digit less.
    pub cancels: Option<&'static str>,
    /// Why half precision cannot be compared.
    pub not_in_half: Option<&'static str>,
    /// Whether it draws random numbers.
    pub draws: bool,
    /// Whether it keeps its output. Then bytes are compared for the sum of the output over the last axis, which keeps nothing.
    pub summed: bool,
    /// Why there is no formula for the kept bytes. Then measured bytes are compared with the ledger and with stock. (Under gradient
    /// checkpointing only with stock, because there Burn's own operations in between hold what they read, which the ledger does not see.)
    pub unstated: Option<&'static str>,
    /// A known fault: why its peak is above that of stock if the input is not tracked.
    pub known_peak: Option<&'static str>,
    /// Why its display differs from that of its twin.
    pub unlike: Option<&'static str>,
}

impl Notes {
    pub fn without(mut self, checks: &[Check], why: &'static str) -> Self {
        self.without.extend(checks.iter().map(|&check| (check, why)));
        self
    }
    /// The range of the inputs on which outputs and gradients are compared.
    pub fn on(self, inputs: Range<f64>) -> Self {
        Self { inputs: Some(inputs), ..self }
    }
    pub fn within(self, tolerance: f64, _why: &'static str) -> Self {
        Self { within: Some(tolerance), ..self }
    }
    pub fn only_f32(self, why: &'static str) -> Self {
        Self { only_f32: Some(why), ..self }
    }
    pub fn not_on_ndarray(self, why: &'static str) -> Self {
        Self { not_on_ndarray: Some(why), ..self }
    }
    pub fn cancels(self, what: &'static str) -> Self {
        Self { cancels: Some(what), ..self }
    }
    pub fn not_in_half(self, why: &'static str) -> Self {
        Self { not_in_half: Some(why), ..self }
    }
    pub fn draws(self) -> Self {
        Self { draws: true, ..self }.without(&[Check::Wgpu], "the generators of two backends differ")
    }
    pub fn when(self, holds: bool, more: fn(Self) -> Self) -> Self {
        if holds { more(self) } else { self }
    }
    pub fn summed(self) -> Self {
        Self { summed: true, ..self }
    }
    pub fn unstated(self, why: &'static str) -> Self {
        Self { unstated: Some(why), ..self }
    }
    pub fn known_peak(self, why: &'static str) -> Self {
        Self { known_peak: Some(why), ..self }
    }
    pub fn unlike(self, why: &'static str) -> Self {
        Self { unlike: Some(why), ..self }
    }

    /// See [`on`](Self::on).
    pub fn inputs(&self) -> Range<f64> {
        self.inputs.clone().unwrap_or(-2.0..2.0)
    }

    /// Whether a row is left out of a check. Prints why.
    pub fn leaves_out(&self, check: Check, name: &str) -> bool {
        if !is_chosen(name) {
            return true;
        }
        match self.without.iter().find(|(without, _)| *without == check) {
            None => false,
            Some((_, why)) => {
                if check != Check::Time {
                    println!("{check:?} of {name} left out: {why}");
                }
                true
            }
        }
    }
}

/// What is tracked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Case {
    /// Everything is tracked.
    Trainable,
    /// Only the input.
    Frozen,
    /// Only the parameters.
    InputUntracked,
    /// Only the bias (in batch norm: beta), if there is one.
    BiasOnly,
    /// Nothing.
    Untracked,
}

impl Case {
    pub const ALL: [Self; 5] =
        [Self::Trainable, Self::Frozen, Self::InputUntracked, Self::BiasOnly, Self::Untracked];

    pub fn input(self) -> bool {
        matches!(self, Self::Trainable | Self::Frozen)
    }
    pub fn weight(self) -> bool {
        matches!(self, Self::Trainable | Self::InputUntracked)
    }
    pub fn any(self) -> bool {
        self != Self::Untracked
    }
    pub fn parameter(self, name: &str) -> bool {
        self.weight() || self == Self::BiasOnly && ["bias", "beta"].contains(&name)
    }
}

/// The shape and type of an input.
#[derive(Clone, Copy)]
pub struct Input<const D: usize> {
    pub shape: [usize; D],
    pub dtype: DType,
}

impl<const D: usize> Input<D> {
    pub fn random(self, device: &Device) -> Tensor<D> {
        Tensor::random(self.shape, Distribution::Normal(0.0, 1.0), (device, self.dtype))
    }
    pub fn elements(self) -> usize {
        self.shape.iter().product()
    }
    /// Bytes of a tensor of its shape and type.
    pub fn floats(self) -> usize {
        self.elements() * self.dtype.size()
    }
    /// Bytes of one bit per element, in words of 64.
    pub fn bits(self) -> usize {
        8 * self.elements().div_ceil(64)
    }
}

/// Formulas of kept bytes that many rows share.
pub mod kept {
    use super::{Case, Input};

    pub fn nothing<const D: usize>(_: Case, _: Input<D>) -> usize {
        0
    }

    /// The input, or a tensor like it, for its own gradient.
    pub fn input<const D: usize>(case: Case, x: Input<D>) -> usize {
        if case.input() { x.floats() } else { 0 }
    }

    /// One bit per element, if the input is tracked.
    pub fn mask<const D: usize>(case: Case, x: Input<D>) -> usize {
        if case.input() { x.bits() } else { 0 }
    }

    /// The input of a layer that is linear in its input and its weight. It keeps each for the gradient of the other, but the weight does
    /// not grow with the batch.
    pub fn bilinear<const D: usize>(case: Case, x: Input<D>) -> usize {
        if case.weight() { x.floats() } else { 0 }
    }

    /// The input of a normalization, which reads it for its gradient and for that of its scale.
    pub fn normalized<const D: usize>(case: Case, x: Input<D>) -> usize {
        if case.input() || case.weight() { x.floats() } else { 0 }
    }

    /// `bytes` per image or signal of the batch.
    pub fn per_image<const D: usize>(bytes: usize) -> impl Fn(Case, Input<D>) -> usize {
        move |case, x| if case.input() { x.shape[0] * bytes } else { 0 }
    }
}
