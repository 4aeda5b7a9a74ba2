//! The table of ResNet-18 in small: what is kept, exactly.
#![recursion_limit = "256"]
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor, Tolerance};
use burn_memsave::measure::{TrackingAllocator, measure_step};
use burn_memsave_paper::vision::{Classifier, ResNet, memsave, stock};
use burn_memsave_paper::{Case, Tracked};
use std::sync::Mutex;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Memory is counted for the whole process.
static ALONE: Mutex<()> = Mutex::new(());

const MIB: u64 = 1 << 20;

fn kept<M: Classifier<Variant = ResNet>>(case: Case, images: &Tensor<4>) -> u64 {
    let model = case.prepare(M::new(ResNet::D18, &images.device()));
    let images = if case.tracks_input() { images.clone().require_grad() } else { images.clone() };
    let step = measure_step(&model, images, |model, images| model.forward(images).sum());
    step.kept.expect("the allocator counts")
}

/// Batch 8 at 224x224, as in the table of the paper.
#[test]
fn keeps_less() {
    let _alone = ALONE.lock();
    let device = Device::flex().autodiff();
    let images = Tensor::<4>::random([8, 3, 224, 224], Distribution::Normal(0.0, 1.0), &device);
    let running = kept::<memsave::resnet::Net>(Case::running(Tracked::Input), &images);
    assert!(running as f64 <= 4.2 * MIB as f64, "{running} bytes with running statistics");
    // Smaller images are enough to compare with stock in every case.
    let images = Tensor::<4>::random([2, 3, 64, 64], Distribution::Normal(0.0, 1.0), &device);
    for case in Case::all() {
        let (ours, stock) =
            (kept::<memsave::resnet::Net>(case, &images), kept::<stock::resnet::Net>(case, &images));
        assert!(ours <= stock, "{}: {ours} bytes, stock {stock}", case.name());
    }
}

/// Both namespaces compute the same from the same record.
#[test]
fn computes_the_same() {
    let _alone = ALONE.lock();
    let device = Device::flex();
    let stock = stock::resnet::Net::new(ResNet::D18, &device);
    let record = stock.clone().into_record();
    let ours = memsave::resnet::Net::new(ResNet::D18, &device).load_record(record);
    let images = Tensor::<4>::random([1, 3, 32, 32], Distribution::Normal(0.0, 1.0), &device);
    let [ours, stock] = [ours.forward(images.clone()), stock.forward(images)].map(Tensor::into_data);
    ours.assert_approx_eq::<f32>(&stock, Tolerance::rel_abs(1e-4, 1e-5));
}
