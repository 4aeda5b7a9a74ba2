//! Sets a thread-local aside while a task runs that must not see it.
use core::cell::RefCell;
use std::thread::LocalKey;

/// The value of a thread-local, which has its default meanwhile. Dropping this puts the value back, also after a panic.
pub(crate) struct Aside<T: Default + 'static> {
    of: &'static LocalKey<RefCell<T>>,
    held: T,
}

impl<T: Default> Aside<T> {
    pub(crate) fn new(of: &'static LocalKey<RefCell<T>>) -> Self {
        Self { of, held: of.take() }
    }
}

impl<T: Default> Drop for Aside<T> {
    fn drop(&mut self) {
        self.of.set(core::mem::take(&mut self.held));
    }
}
