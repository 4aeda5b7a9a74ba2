//! What is refused: an error, and no hang. (Tensors in a closure do not compile: see the documentation of the module.)
use super::*;
use burn::nn::{Dropout, DropoutConfig};
use burn_memsave::functional as F;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The message of the panic in the backward pass.
#[track_caller]
fn message(y: Tensor<2>) -> String {
    let panic = catch_unwind(AssertUnwindSafe(|| y.sum().backward())).err().expect("a panic");
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => (*panic.downcast::<&str>().expect("a message")).into(),
    }
}

/// How often something ran.
static TIMES: AtomicUsize = AtomicUsize::new(0);

fn is_first() -> bool {
    TIMES.fetch_add(1, Ordering::Relaxed) == 0
}

#[test]
fn segments_that_change() {
    let _alone = alone();
    let none: Vec<Dropout> = vec![];
    type Change = fn(&Vec<Dropout>, Tensor<2>) -> Tensor<2>;
    let changes: [(&str, Change, &str); 6] = [
        (
            "another operation",
            |_, x| if is_first() { F::relu(x) } else { F::silu(x) },
            "runs silu, which gives Shape { dims: [3, 4] } of F32, in the place of relu",
        ),
        (
            "another shape",
            |_, x| if is_first() { F::silu(x) } else { F::silu(x.slice(0..2)) },
            "runs silu, which gives Shape { dims: [2, 4] } of F32, in the place of silu, which gives Shape { dims: [3, 4] }",
        ),
        (
            "an operation more",
            |_, x| if is_first() { F::relu(x) } else { F::relu(F::relu(x)) },
            "more than before",
        ),
        ("one less", |_, x| if is_first() { F::relu(F::relu(x)) } else { F::relu(x) }, "ends before relu"),
        ("another result", |_, x| if is_first() { x * 2.0 } else { x * 3.0 }, "output 0"),
        (
            "other numbers drawn",
            |_, x| if is_first() { F::rrelu(x, 0.1, 0.2) } else { F::dropout(x, 0.5) },
            "draws other random numbers",
        ),
    ];
    for device in devices() {
        for (what, change, expected) in changes {
            TIMES.store(0, Ordering::Relaxed);
            let x = random([3, 4], &device).require_grad();
            let message = message(checkpoint(&none, x, change));
            assert!(message.contains(expected), "{what}: {message}");
        }
    }
}

/// Burn's own layer draws from the generator, which has moved on.
#[test]
fn dropout_of_burn() {
    let _alone = alone();
    for device in devices() {
        let dropout = DropoutConfig::new(0.5).init();
        let x = random([30, 4], &device).require_grad();
        let message = message(checkpoint(&dropout, x, |dropout, x| dropout.forward(x)));
        assert!(message.contains("draws random numbers that are not this library's"), "{message}");
    }
}

#[test]
fn a_second_backward_pass() {
    let _alone = alone();
    for device in devices() {
        let x = random([3, 4], &device).require_grad();
        let y = checkpoint(&Vec::<Dropout>::new(), x, |_, x| F::relu(x));
        y.clone().sum().backward();
        assert!(message(y).contains("already been consumed"));
    }
}

/// A segment that panics the second time leaves nothing behind that would disturb the next one.
#[test]
fn after_a_panic() {
    let _alone = alone();
    for device in devices() {
        TIMES.store(0, Ordering::Relaxed);
        let x = random([3, 4], &device).require_grad();
        let y = checkpoint(&Vec::<Dropout>::new(), x, |_, x| {
            assert!(is_first(), "the second time");
            F::relu(x)
        });
        assert!(message(y).contains("the second time"));
        let x = random([3, 4], &device).require_grad();
        let y = checkpoint(&Vec::<Dropout>::new(), x.clone(), |_, x| F::dropout(x, 0.5));
        assert!(x.grad(&y.sum().backward()).is_some());
    }
}

#[test]
fn other_outputs() {
    let _alone = alone();
    let none: Vec<Dropout> = vec![];
    for device in devices() {
        for (first, then, expected) in [(2, 1, "has fewer outputs"), (1, 2, "has more outputs")] {
            TIMES.store(0, Ordering::Relaxed);
            let x = random([3, 4], &device).require_grad();
            let y: Vec<Tensor<2>> = checkpoint(&none, (x, first, then), |_, (x, first, then)| {
                vec![F::relu(x); if is_first() { first } else { then }]
            });
            let message = message(y[0].clone());
            assert!(message.contains(expected), "{message}");
        }
        TIMES.store(0, Ordering::Relaxed);
        let x = random([3, 4], &device).require_grad();
        let y = checkpoint(&none, x, |_, x| if is_first() { x * 2.0 } else { x.detach() * 2.0 });
        let message = message(y);
        assert!(message.contains("output 0") && message.contains("is not tracked"), "{message}");
    }
}
