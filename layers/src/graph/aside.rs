//! What a thread has entered, set aside while a task runs that has nothing to do with it.
use core::cell::RefCell;
use std::thread::LocalKey;

/// The value of a thread-local, which is put back when this is dropped, also after a panic. Meanwhile the default is there.
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
