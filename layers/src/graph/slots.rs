//! Slots, through which steps and the functions that they run pass each other tensors, outside of Burn's gradients.
use burn::backend::{Backend, tensor::FloatTensor};
use core::any::Any;
use core::fmt;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Tensors without autodiff, of one backend, by the number of their slot.
#[derive(Clone, Default)]
pub struct Slots(Arc<Mutex<HashMap<usize, Box<dyn Any + Send>>>>);

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Slots")
    }
}

impl Slots {
    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Box<dyn Any + Send>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner) // every statement leaves it whole
    }

    /// Puts a tensor into a slot, or adds it to the one that is there. Returns whether there was one.
    pub(super) fn add<B: Backend>(&self, slot: usize, tensor: FloatTensor<B>) -> bool {
        let before = self.take::<B>(slot);
        let is_more = before.is_some();
        let sum = match before {
            Some(sum) => B::float_add(sum, tensor),
            None => tensor,
        };
        self.lock().insert(slot, Box::new(sum));
        is_more
    }

    pub(super) fn take<B: Backend>(&self, slot: usize) -> Option<FloatTensor<B>> {
        let tensor = self.lock().remove(&slot)?;
        Some(*tensor.downcast().expect("a tensor of the backend of the segment"))
    }

    /// Whether there is a tensor in the slot.
    pub fn has(&self, slot: usize) -> bool {
        self.lock().contains_key(&slot)
    }
}
