//! The memory of a cache of keys and values. Memory is counted for the whole process: this is the only test in it.
#![recursion_limit = "256"]
use burn::tensor::{DType, Device, Int, Tensor};
use burn_memsave::measure::{RunMemory, TrackingAllocator};
use burn_memsave_models::memsave::{decoder::Llama, gpt2::Gpt2};
use burn_memsave_models::{Decoder, DecoderSize, Generate, Gpt2Size, KeyValueCache};

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// The records of tensors and pages.
const RECORDS: u64 = 16 << 10;

/// It holds the bytes that it says, whatever the parts in which a prompt was computed: no page keeps the part that it was in.
#[test]
fn a_cache_holds_what_it_says() {
    of_a_llama();
    of_a_gpt2();
}

/// Its queries, keys and values are parts of one tensor, also of a prompt that does not fill a page.
fn of_a_gpt2() {
    let device = Device::flex();
    let size = Gpt2Size { width: 96, length: 100, ..Gpt2Size::TINY };
    let model = Gpt2::new(&size, &device);
    let tokens = Tensor::<2, Int>::ones([1, 40], &device);
    drop(model.next_logits(tokens.clone(), 40, &mut model.cache(None)));
    let mut memory = RunMemory::start(&device);
    memory.step();
    let mut cache = model.cache(None);
    drop(model.next_logits(tokens, 40, &mut cache));
    memory.step();
    assert_eq!(cache.bytes(), size.cache_bytes(1, 40, DType::F32, DType::F32));
    assert_held(&memory, &cache, "a GPT-2");
}

fn of_a_llama() {
    let device = Device::flex();
    let size = DecoderSize { width: 64, heads: 4, length: 400, ..DecoderSize::LLAMA_3_2_1B.tiny() };
    let model = Llama::new(&size, &device);
    let tokens = |count: usize| Tensor::<2, Int>::ones([1, count], &device);
    let fill = |cache: &mut KeyValueCache, at_once: usize| {
        drop(model.next_logits(tokens(300), at_once, cache));
        for _ in 0..3 {
            drop(model.next_logits(tokens(1), 1, cache));
        }
    };
    // Weights are made when they are used.
    fill(&mut model.cache(None), 300);
    for stored in [None, Some(DType::BF16), Some(DType::I8)] {
        for at_once in [300, 100, 64, 1] {
            let mut memory = RunMemory::start(&device);
            memory.step();
            let mut cache = model.cache(stored);
            fill(&mut cache, at_once);
            memory.step();
            assert_eq!(cache.bytes(), size.cache_bytes(1, 303, stored.unwrap_or(DType::F32), DType::F32));
            assert_held(&memory, &cache, &format!("{stored:?}, {at_once} at once"));
        }
    }
}

/// The second step held as many bytes more as the cache says.
fn assert_held(memory: &RunMemory, cache: &KeyValueCache, case: &str) {
    let [before, after] = [0, 1].map(|step| memory.steps()[step].after.expect("the allocator counts"));
    let (held, said) = (after.saturating_sub(before), cache.bytes());
    assert!((said..said + RECORDS).contains(&held), "{case}: {held} bytes are held, the cache says {said}");
}
