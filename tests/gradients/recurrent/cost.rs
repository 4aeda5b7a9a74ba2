//! The cost of a step must not depend on the number of steps.
use super::*;
use burn::module::{Module, ModuleMapper};
use burn::nn::{GruConfig, LstmConfig, RnnConfig};
use burn::tensor::DType;
use burn_memsave::layers::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Counts the bytes that every thread asks for.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: everything goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no counter any more.
        let _ = ALLOCATED.try_with(|bytes| bytes.set(bytes.get() + layout.size()));
        // SAFETY: the caller's promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Gives parameters a type.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(self.0).detach().require_grad())
    }
}

/// The time is linear in the number of steps: the second half of the steps allocates what the first does. (A step that copied
/// all steps would allocate them.) In half precision a step reads its rows as views.
#[test]
fn a_step_costs_the_same_however_many_there_are() {
    let _generator = generator();
    let device = Backend::Flex.autodiff_devices()[0].clone();
    let [d_input, hidden] = [4, 16];
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let check = |name: &str, forward: &dyn Fn(Tensor<3>) -> Tensor<3>| {
            let allocated = |steps: usize| {
                let x = Tensor::<3>::ones([1, steps, d_input], (&device, dtype)).require_grad();
                let before = ALLOCATED.get();
                drop(forward(x).sum().backward());
                ALLOCATED.get() - before
            };
            let [first, both] = [500, 1000].map(allocated);
            assert!(
                both - first < first + first / 10,
                "{name} of {dtype:?}: {first} bytes for 500 steps, {both} for 1000"
            );
        };
        for input_forget in [false, true] {
            let config = LstmConfig::new(d_input, hidden, true).with_input_forget(input_forget);
            let lstm = MemSaveLstm::from(config.init(&device)).map(&mut Cast(dtype));
            check("lstm", &|x| lstm.forward(x, None).0);
            check("lstm with checkpoints", &|x| lstm.forward_checkpointed(x, None, 30).0);
        }
        for reset_after in [false, true] {
            let config = GruConfig::new(d_input, hidden, true).with_reset_after(reset_after);
            let gru = MemSaveGru::from(config.init(&device)).map(&mut Cast(dtype));
            check("gru", &|x| gru.forward(x, None));
        }
        let rnn = MemSaveRnn::from(RnnConfig::new(d_input, hidden, true).init(&device)).map(&mut Cast(dtype));
        check("rnn", &|x| rnn.forward(x, None).0);
    }
}
