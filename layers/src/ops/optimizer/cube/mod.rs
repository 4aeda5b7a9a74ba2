//! Kernels for devices: one for each step, in place where nobody else holds a tensor. Words of 32 bits hold four codes each, so that no
//! device needs numbers of 8 bits. A cube takes a block of codes.
use super::{
    AdamW8bitTensors, AdamWStep, AdamWTensors, BLOCK, CODES_OF_WORD, Descent, MomentumStep, MomentumTensors,
    OptimizerKernels, StepFactors, is_rounded,
};
use crate::backend::cube::{Grid, Output, launch, vector_size};
use burn::backend::{
    Backend, Cube, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use kernels::{AdamWScalarsLaunch, Rounding, UNITS, adamw, adamw_8bit, descend, momentum_8bit};

mod codes;
mod kernels;

impl OptimizerKernels for Cube {
    fn adamw(
        gradient: FloatTensor<Self>,
        tensors: AdamWTensors<Self>,
        step: AdamWStep,
    ) -> AdamWTensors<Self> {
        let AdamWTensors { weight, first, second } = tensors;
        let (weight, first, second) = Self::cube_adamw(gradient, weight, first, second, step);
        AdamWTensors { weight, first, second }
    }

    fn adamw_8bit(
        gradient: FloatTensor<Self>,
        tensors: AdamW8bitTensors<Self>,
        step: AdamWStep,
    ) -> AdamW8bitTensors<Self> {
        let AdamW8bitTensors { weight, first, first_scales, second, second_scales } = tensors;
        let (weight, first, first_scales, second, second_scales) =
            Self::cube_adamw_8bit(gradient, weight, first, first_scales, second, second_scales, step);
        AdamW8bitTensors { weight, first, first_scales, second, second_scales }
    }

    fn momentum_8bit(
        gradient: FloatTensor<Self>,
        codes: IntTensor<Self>,
        scales: FloatTensor<Self>,
        step: MomentumStep,
    ) -> MomentumTensors<Self> {
        let (direction, codes, scales) = Self::cube_momentum_8bit(gradient, codes, scales, step);
        MomentumTensors { direction, codes, scales }
    }

    fn descend(
        weight: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        descent: Descent,
    ) -> FloatTensor<Self> {
        Self::cube_descend(weight, direction, descent)
    }
}

#[allow(clippy::type_complexity, reason = "Burn's macro reads the tuple")]
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait OptimizerCube: Backend {
    /// The weight and both moments.
    #[fusion(meta = |_gradient, weight, first, second, _step| (weight.clone(), first.clone(), second.clone()))]
    fn cube_adamw(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        step: AdamWStep,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// The weight, and the codes and scales of both moments.
    #[fusion(meta = |_gradient, weight, first, first_scales, second, second_scales, _step| {
        (weight.clone(), first.clone(), first_scales.clone(), second.clone(), second_scales.clone())
    })]
    fn cube_adamw_8bit(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        first: IntTensor<Self>,
        first_scales: FloatTensor<Self>,
        second: IntTensor<Self>,
        second_scales: FloatTensor<Self>,
        step: AdamWStep,
    ) -> (FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>);

    /// The direction, the codes and the scales.
    #[fusion(meta = |gradient, codes, scales, _step| (gradient.clone(), codes.clone(), scales.clone()))]
    fn cube_momentum_8bit(
        gradient: FloatTensor<Self>,
        codes: IntTensor<Self>,
        scales: FloatTensor<Self>,
        step: MomentumStep,
    ) -> (FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>);

    /// The weight.
    #[fusion(dtype = weight, shape = weight)]
    fn cube_descend(
        weight: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        descent: Descent,
    ) -> FloatTensor<Self>;
}

impl Rounding {
    fn of(dtype: DType, seed: Option<u32>) -> Self {
        match (seed.is_some() && is_rounded(dtype), dtype) {
            (false, _) => Self::Nearest,
            (true, DType::BF16) => Self::Bf16,
            (true, _) => Self::F16,
        }
    }
}

impl AdamWStep {
    fn scalars(&self) -> AdamWScalarsLaunch {
        let StepFactors { rate, root, .. } = self.factors();
        let [seed, of_codes] = [self.seed, self.seed_of_codes()].map(|seed| seed.unwrap_or(0));
        AdamWScalarsLaunch::new(self.beta_1, self.beta_2, self.epsilon, rate, root, seed, of_codes)
    }
}

impl OptimizerCube for CubeBackend {
    fn cube_adamw(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        step: AdamWStep,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let rounding = Rounding::of(weight.dtype, step.seed);
        let [of_weight, of_first, of_second] = [(&weight, 1), (&first, 2), (&second, 3)]
            .map(|(x, input)| Output::replacing_contiguous(x, input));
        let tensors = [&weight, &gradient, &first, &second];
        if let Some(grid) = Grid::of_units(weight.meta.num_elements(), &tensors) {
            // SAFETY: the kernel compares every position with the shape.
            unsafe {
                launch!(
                    adamw,
                    grid,
                    gradient.into_linear_view(),
                    weight.into_linear_view(),
                    first.into_linear_view(),
                    second.into_linear_view(),
                    of_weight.view(),
                    of_first.view(),
                    of_second.view(),
                    step.scalars(),
                    grid.scalar(step.factors().keep),
                    step.cautious,
                    rounding,
                    grid.dtypes,
                );
            }
        }
        (of_weight.tensor, of_first.tensor, of_second.tensor)
    }

    fn cube_adamw_8bit(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        first: IntTensor<Self>,
        first_scales: FloatTensor<Self>,
        second: IntTensor<Self>,
        second_scales: FloatTensor<Self>,
        step: AdamWStep,
    ) -> (FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>) {
        let elements = weight.meta.num_elements();
        let rounding = Rounding::of(weight.dtype, step.seed);
        let outputs = [(&weight, 1), (&first, 2), (&first_scales, 3), (&second, 4), (&second_scales, 5)];
        let outputs = outputs.map(|(x, input)| Output::replacing_contiguous(x, input));
        if elements > 0 {
            let size = vector_size(&[&gradient, &weight, &outputs[0].tensor], CODES_OF_WORD);
            let grid = Grid::of_cubes(elements.div_ceil(BLOCK), UNITS, &[&weight, &gradient]);
            let [of_weight, of_first, of_first_scales, of_second, of_second_scales] =
                outputs.each_ref().map(Output::view);
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                launch!(
                    adamw_8bit,
                    grid,
                    size,
                    gradient.into_linear_view(),
                    weight.into_linear_view(),
                    first.into_linear_view(),
                    first_scales.into_linear_view(),
                    second.into_linear_view(),
                    second_scales.into_linear_view(),
                    of_weight,
                    of_first,
                    of_first_scales,
                    of_second,
                    of_second_scales,
                    step.scalars(),
                    grid.scalar(step.factors().keep),
                    step.cautious,
                    rounding,
                    step.seed.is_some(),
                    grid.dtypes,
                );
            }
        }
        let [weight, first, first_scales, second, second_scales] = outputs.map(|output| output.tensor);
        (weight, first, first_scales, second, second_scales)
    }

    fn cube_momentum_8bit(
        gradient: FloatTensor<Self>,
        codes: IntTensor<Self>,
        scales: FloatTensor<Self>,
        step: MomentumStep,
    ) -> (FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>) {
        let elements = gradient.meta.num_elements();
        let [direction, of_codes, of_scales] = [(&gradient, 0), (&codes, 1), (&scales, 2)]
            .map(|(x, input)| Output::replacing_contiguous(x, input));
        if elements > 0 {
            let size = vector_size(&[&gradient, &direction.tensor], CODES_OF_WORD);
            let grid = Grid::of_cubes(elements.div_ceil(BLOCK), UNITS, &[&gradient]);
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                launch!(
                    momentum_8bit,
                    grid,
                    size,
                    gradient.into_linear_view(),
                    codes.into_linear_view(),
                    scales.into_linear_view(),
                    direction.view(),
                    of_codes.view(),
                    of_scales.view(),
                    step.momentum,
                    step.gradient,
                    step.nesterov,
                );
            }
        }
        (direction.tensor, of_codes.tensor, of_scales.tensor)
    }

    fn cube_descend(
        weight: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        descent: Descent,
    ) -> FloatTensor<Self> {
        let output = Output::replacing_contiguous(&weight, 0);
        if let Some(grid) = Grid::of_units(weight.meta.num_elements(), &[&weight, &direction]) {
            let rounding = Rounding::of(weight.dtype, descent.seed);
            // SAFETY: the kernel compares every position with the shape.
            unsafe {
                launch!(
                    descend,
                    grid,
                    weight.into_linear_view(),
                    direction.into_linear_view(),
                    output.view(),
                    grid.scalar(descent.keep),
                    grid.scalar(descent.lr),
                    descent.seed.unwrap_or(0),
                    rounding,
                    grid.dtypes,
                );
            }
        }
        output.tensor
    }
}
