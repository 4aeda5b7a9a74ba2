//! Measures training steps: their memory one after the other, their times in turns.
use super::Failure;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_memsave::measure::{Measurement, StepInput, bytes_in_use, measure_step};
use std::time::Instant;

/// One way to make a step: a model, its input and its loss.
pub trait Step {
    fn memory(&self) -> Measurement;
    /// The time of a forward and backward pass.
    fn seconds(&self) -> f64;
}

struct Of<M, I, F>(M, I, F);

impl<M: Module, I: StepInput, F: Fn(&M, I) -> Tensor<1>> Step for Of<M, I, F> {
    fn memory(&self) -> Measurement {
        measure_step(&self.0, self.1.copy(), &self.2)
    }

    fn seconds(&self) -> f64 {
        let input = self.1.copy();
        let device = input.device();
        // If the device fails here, the step failed and reports it.
        let _ = device.sync();
        let start = Instant::now();
        let loss = (self.2)(&self.0, input);
        if loss.is_tracked() {
            drop(loss.backward());
        }
        let _ = device.sync();
        start.elapsed().as_secs_f64()
    }
}

/// A step of a model.
pub fn step<'a, M: Module + 'a, I: StepInput + 'a>(
    model: M,
    input: I,
    loss: impl Fn(&M, I) -> Tensor<1> + 'a,
) -> Box<dyn Step + 'a> {
    Box::new(Of(model, input, loss))
}

/// What a step took.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Bytes alive after the forward pass.
    pub kept: u64,
    /// The most bytes alive at one time, beyond parameters and input.
    pub peak: u64,
    /// The median of the times.
    pub seconds: f64,
}

/// Measures the memory and the time of each step, then repeats the times in turns, up to `turns` of them. So a temporary disturbance of
/// the machine affects all steps.
///
/// # Errors
///
/// If bytes are not counted on the device.
pub fn in_turns<const N: usize>(turns: usize, steps: [Box<dyn Step + '_>; N]) -> Result<[Taken; N], Failure> {
    let (mut taken, mut times) = (vec![], vec![]);
    for step in &steps {
        let Measurement { kept: Some(kept), peak: Some(peak), forward_time, backward_time, .. } =
            step.memory()
        else {
            return Err(NOT_COUNTED.into());
        };
        taken.push((kept, peak));
        times.push(vec![(forward_time + backward_time).as_secs_f64()]);
    }
    for _ in 1..turns {
        steps.iter().zip(&mut times).for_each(|(step, times)| times.push(step.seconds()));
    }
    let mut taken = taken.into_iter().zip(times);
    Ok(std::array::from_fn(|_| {
        let ((kept, peak), times) = taken.next().expect("one for each step");
        Taken { kept, peak, seconds: median(times) }
    }))
}

pub const NOT_COUNTED: &str = "bytes are not counted on this device";

/// Bytes in use on a device once it has finished its work.
///
/// # Errors
///
/// If they are not counted, or if the device fails.
pub fn in_use(device: &Device) -> Result<u64, Failure> {
    device.sync()?;
    bytes_in_use(device).ok_or_else(|| NOT_COUNTED.into())
}

/// The median; for an even number of values, the mean of the two in the middle.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        count if count.is_multiple_of(2) => values[middle - 1].midpoint(values[middle]),
        _ => values[middle],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0]), 2.5);
        assert!(median(vec![]).is_nan());
    }
}
