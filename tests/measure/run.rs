//! The memory over a run.
use crate::{alone, cpu_devices};
use burn::tensor::Tensor;
use burn_memsave::measure::RunMemory;

/// What a step leaves, and what it needs for a moment.
const LEFT: usize = 100_000;
const TEMPORARY: usize = 1_000_000;
/// What the harness of the tests may take or free meanwhile.
const SLACK: u64 = LEFT as u64 / 2;

#[test]
fn what_grows_is_seen_step_by_step() {
    let _alone = alone();
    for device in cpu_devices() {
        let mut memory = RunMemory::start(&device);
        let mut left = vec![];
        for _ in 0..5 {
            left.push(Tensor::<1>::ones([LEFT], &device));
            drop(Tensor::<1>::ones([TEMPORARY], &device));
            memory.step();
        }
        for pair in memory.steps().windows(2) {
            let grown = pair[1].after.unwrap() - pair[0].after.unwrap();
            assert!(grown.abs_diff(4 * LEFT as u64) < SLACK, "{memory}");
            let temporary = pair[1].most.unwrap() - pair[1].after.unwrap();
            assert!(temporary.abs_diff(4 * TEMPORARY as u64) < SLACK, "{memory}");
            assert!(pair[1].time >= pair[0].time);
        }
        assert!(memory.steps().iter().all(|step| step.reserved.is_none())); // there is no pool
        assert_eq!(memory.to_csv().lines().count(), 6);
        let svg = memory.to_svg();
        assert_eq!((svg.matches("<polyline").count(), svg.matches(">step ").count()), (2, 5), "{svg}");
        assert!(memory.to_string().contains("| 5 "), "{memory}");
    }
}

#[test]
fn a_run_without_steps_is_an_empty_plot() {
    let _alone = alone();
    for device in cpu_devices() {
        let mut memory = RunMemory::start(&device);
        let empty = memory.to_svg();
        memory.step();
        for svg in [empty, memory.to_svg()] {
            assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
