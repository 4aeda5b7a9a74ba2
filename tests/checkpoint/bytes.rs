//! Tests what a segment keeps.
use super::segments::Block;
use super::*;
use burn_memsave::checkpoint::checkpoint_tiled;
use burn_memsave::measure::LayerMeasurement;

const WIDTH: usize = 64;

fn measure(rows: usize, device: &Device, forward: impl Fn(Tensor<2>) -> Tensor<2>) -> LayerMeasurement {
    meter::measure(device, || random([rows, WIDTH], device).require_grad(), forward)
}

/// Nothing grows with the batch but the inputs, and a bit per element that is dropped.
#[test]
fn segments_keep_their_inputs() {
    const BLOCKS: usize = 4;
    let _alone = alone();
    for device in devices() {
        for dropout in [0.0, 0.3] {
            let blocks: Vec<Block> = (0..BLOCKS).map(|_| Block::new(WIDTH, dropout, &device)).collect();
            let plain = |x| blocks.iter().fold(x, |x, block| block.forward(x));
            let checked = |x| blocks.iter().fold(x, |x, block| checkpoint(block, x, Block::forward));
            let [few, many] = [64, 192].map(|rows| measure(rows, &device, checked));
            let grown = many.kept.unwrap() - few.kept.unwrap();
            let elements = (192 - 64) * WIDTH as u64;
            let dropped = if dropout > 0.0 { 2 * elements / 8 } else { 0 };
            assert_eq!(grown, BLOCKS as u64 * (4 * elements + dropped));
            let plain = measure(192, &device, plain);
            assert!(many.kept < plain.kept, "{:?}, plain {:?}", many.kept, plain.kept);
            assert!(many.peak < plain.peak, "{:?}, plain {:?}", many.peak, plain.peak);
        }
    }
}

/// An input that is computed again is not kept.
#[test]
fn inputs_may_be_computed_again() {
    let _alone = alone();
    for device in devices() {
        let [first, second] = [(); 2].map(|()| Block::new(WIDTH, 0.0, &device));
        let norm: burn_memsave::nn::LayerNorm = burn_memsave::nn::LayerNormConfig::new(WIDTH).init(&device);
        let forward = |x| {
            let y = norm.forward(checkpoint(&first, x, Block::forward));
            checkpoint(&second, y, Block::forward)
        };
        let [few, many] = [64, 192].map(|rows| measure(rows, &device, forward).kept.unwrap());
        // The input of the first segment, and that of the norm.
        assert_eq!(many - few, 2 * 4 * (192 - 64) * WIDTH as u64);
    }
}

/// Segments that are dropped without a backward pass are freed in the next one through their parameters, as Burn's operations are.
#[test]
fn dropped_segments_hold_nothing() {
    let _alone = alone();
    for device in devices() {
        let block = Block::new(WIDTH, 0.3, &device);
        let forward = || checkpoint(&block, random([64, WIDTH], &device).require_grad(), Block::forward);
        let live = || {
            forward().sum().backward();
            TrackingAllocator::live()
        };
        live();
        let before = live();
        (0..20).for_each(|_| drop(forward()));
        live();
        let after = live();
        // Less than the input of one of them; tables of the graph may have grown.
        assert!(after < before + 4 * 64 * WIDTH as u64, "{before} bytes before, {after} after");
    }
}

/// A tiled feed-forward block keeps its input, and needs what one tile does.
#[test]
fn tiles_keep_their_input() {
    let _alone = alone();
    for device in devices() {
        let block = Block::new(WIDTH, 0.0, &device);
        let tile = |x| checkpoint_tiled(&block, x, 0, 64, Block::forward);
        let [few, many] = [256, 1024].map(|rows| measure(rows, &device, tile));
        let grown = 4 * (1024 - 256) * WIDTH as u64;
        // And what every tile remembers of itself.
        let kept = many.kept.unwrap() - few.kept.unwrap();
        assert!((grown..grown + 2048 * (1024 - 256) / 64).contains(&kept), "{kept}, not {grown}");
        // At the peak the input, its gradient, that of the output, and the output where it is summed.
        assert!(many.peak.unwrap() - few.peak.unwrap() <= 4 * grown, "{:?}, {:?}", many.peak, few.peak);
        let plain = measure(1024, &device, |x| block.forward(x));
        assert!(many.peak < plain.peak, "{:?}, plain {:?}", many.peak, plain.peak);
    }
}
