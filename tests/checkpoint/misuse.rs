//! Misuse of segments must be an error, and never a hang. (Tensors in a closure do not compile: see the documentation of the module.)
use super::*;
use burn::nn::{Dropout, DropoutConfig};
use burn::tensor::{FloatDType, Int};
use burn_memsave::checkpoint::checkpoint_tiled;
use burn_memsave::functional as F;
use burn_memsave::measure::ledger;
use burn_memsave::nn as ours;
use burn_memsave::saved::SavedPolicy;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;
use std::{env, thread};

/// The message of the panic in the backward pass.
#[track_caller]
pub fn message(y: Tensor<2>) -> String {
    message_of(|| drop(y.sum().backward()))
}

/// The message of a panic.
#[track_caller]
fn message_of(f: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(f)).expect_err("a panic");
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
    static IS_BACKWARD: AtomicBool = AtomicBool::new(false);
    let _alone = alone();
    for device in devices() {
        IS_BACKWARD.store(false, Ordering::Relaxed);
        let x = random([3, 4], &device).require_grad();
        let y = checkpoint(&Vec::<Dropout>::new(), x, |_, x| {
            assert!(!IS_BACKWARD.load(Ordering::Relaxed), "the second time");
            F::relu(x)
        });
        IS_BACKWARD.store(true, Ordering::Relaxed);
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

/// A layer with tensors that are no parameters.
#[derive(Module, Debug)]
struct Holding {
    up: ours::Linear,
    norm: Option<ours::BatchNorm>,
    dropout: ours::Dropout,
    #[module(skip)]
    skipped: Option<Tensor<2>>,
    plain: Option<Tensor<2>>,
}

impl Holding {
    fn new(device: &Device) -> Self {
        let up = ours::LinearConfig::new(4, 4).init(device);
        let dropout = ours::DropoutConfig::new(0.3).init();
        Self { up, norm: None, dropout, skipped: None, plain: None }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let mut y = self.dropout.forward(self.up.forward(x).tanh());
        if let Some(norm) = &self.norm {
            y = norm.forward(y);
        }
        for scale in self.skipped.iter().chain(&self.plain) {
            y = y * scale.clone();
        }
        F::silu(y)
    }

    fn within(&self, x: Tensor<2>) -> Tensor<2> {
        F::relu(checkpoint(self, x, Self::forward))
    }
}

/// The panic of a forward pass; it is over soon. (A hang would hold the graphs of the other tests.)
#[track_caller]
fn soon(what: &str, f: impl FnOnce() + Send + 'static) -> String {
    let (send, receive) = mpsc::channel();
    let thread = thread::spawn(move || send.send(message_of(f)));
    let message = receive.recv_timeout(Duration::from_secs(60));
    let message = message.unwrap_or_else(|error| panic!("{what}: {error}"));
    thread.join().expect("a thread that ends").expect("somebody who receives");
    message
}

#[test]
fn captured_tensors() {
    let _alone = alone();
    type Forward = fn(&Holding, Tensor<2>, &'static Tensor<2>) -> Tensor<2>;
    // Where the tensor is, whether the module has running statistics, and what is run.
    let skipped = |holding: Holding, scale| Holding { skipped: Some(scale), ..holding };
    let plain = |holding: Holding, scale| Holding { plain: Some(scale), ..holding };
    type Put = fn(Holding, Tensor<2>) -> Holding;
    let nowhere = |holding: Holding, _| holding;
    let once: Forward = |holding, x, _| checkpoint(holding, x, Holding::forward);
    let nested: Forward = |holding, x, _| checkpoint(holding, x, Holding::within);
    let parts: Forward = |holding, x, _| checkpoint_tiled(holding, x, 0, 2, Holding::forward);
    let closure: Forward =
        |holding, x, scale| checkpoint(holding, x, move |holding, x| holding.forward(x) * scale.clone());
    let nested_closure: Forward = |holding, x, scale| {
        checkpoint(holding, x, move |holding, x| {
            checkpoint(holding, x, move |holding, x| holding.forward(x) * scale.clone()).tanh()
        })
    };
    let rows: [(&str, Put, bool, Forward); 9] = [
        ("a skipped field", skipped, false, once),
        ("a skipped field beside running statistics", skipped, true, once),
        ("a skipped field in a segment in a segment", skipped, false, nested),
        ("a skipped field, in tiles", skipped, false, parts),
        ("a plain field", plain, false, once),
        ("a plain field beside running statistics", plain, true, once),
        ("a plain field in a segment in a segment", plain, false, nested),
        ("the closure", nowhere, false, closure),
        ("a closure in a closure", nowhere, false, nested_closure),
    ];
    for device in devices() {
        let is_plain = device.gradient_checkpointing_strategy() == Some(Default::default());
        for (what, put, remembers, forward) in rows {
            // Documented: not seen.
            let seen = is_plain || !(what.contains("plain") && remembers);
            for is_leaf in [true, false] {
                let mut holding = Holding::new(&device);
                holding.norm = remembers.then(|| ours::BatchNormConfig::new(4).init(&device));
                drop(holding.forward(random([3, 4], &device)));
                let leaf = random([3, 4], &device).require_grad();
                let scale = if is_leaf { leaf } else { leaf * 2.0 };
                let scale = if what.contains("tiles") { scale.slice(0..1) } else { scale };
                let fixed: &'static Tensor<2> = Box::leak(Box::new(scale.clone()));
                let holding = put(holding, scale);
                let x = random([3, 4], &device).require_grad();
                if seen {
                    let message = soon(what, move || drop(forward(&holding, x, fixed)));
                    assert!(message.contains("a captured tracked tensor"), "{what}: {message}");
                    assert!(message.contains("make it an argument"), "{what}: {message}");
                }
            }
        }
        // As it is with constants: the same, to the last bit, and nothing is drawn or remembered twice.
        for put in [skipped as Put, plain] {
            let x = random([3, 4], &device);
            let constant = random([3, 4], &device);
            for constant in [constant.clone(), constant.inner()] {
                let holding = put(Holding::new(&device), constant);
                same(&holding, x.clone(), true, Holding::forward, |holding, x| {
                    checkpoint(holding, x, Holding::forward)
                });
                same(&holding, x.clone(), true, Holding::within, |holding, x| {
                    checkpoint(holding, x, Holding::within)
                });
                let statistics = |forward: fn(&Holding, Tensor<2>) -> Tensor<2>| {
                    let norm: ours::BatchNorm = ours::BatchNormConfig::new(4).init(&device);
                    let holding = Holding {
                        norm: Some(norm.clone()),
                        dropout: ours::DropoutConfig::new(0.0).init(),
                        ..holding.clone()
                    };
                    let x = x.clone().require_grad();
                    (0..2).for_each(|_| drop(forward(&holding, x.clone()).sum().backward()));
                    [&norm.running_mean, &norm.running_var].map(|state| state.value().into_data())
                };
                let plain = statistics(Holding::forward);
                assert_eq!(plain, statistics(|holding, x| checkpoint(holding, x, Holding::forward)));
            }
        }
        // A constant, in a static.
        let fixed: &'static Tensor<2> = Box::leak(Box::new(random([3, 4], &device)));
        let forward = move |holding: &Holding, x: Tensor<2>| holding.forward(x) * fixed.clone();
        same(&Holding::new(&device), random([3, 4], &device), true, forward, |holding, x| {
            checkpoint(holding, x, move |holding, x| holding.forward(x) * fixed.clone())
        });
    }
}

/// Runs of which no output is tracked, in which there is nothing to see, hide nothing from the runs beside them.
#[test]
fn captured_tensors_beside_untracked_outputs() {
    let _alone = alone();
    for device in devices() {
        for runs in [[false, true, false, true], [false, false, true, true], [true, false, true, false]] {
            let holding = Holding::new(&device);
            let x = random([3, 4], &device).require_grad();
            let fixed: &'static Tensor<2> = Box::leak(Box::new(random([3, 4], &device).require_grad()));
            for is_tracked in runs {
                let (holding, x) = (holding.clone(), x.clone());
                let run = move || {
                    checkpoint(&holding, x, move |holding, x| {
                        let y = holding.forward(x) * fixed.clone();
                        if is_tracked { y } else { y.detach() }
                    })
                };
                if !is_tracked {
                    assert!(!run().is_tracked());
                } else {
                    let message = soon("a captured tensor", move || drop(run()));
                    assert!(message.contains("a captured tracked tensor"), "{message}");
                }
            }
        }
    }
}

/// The forward pass that looks for captured tensors runs once, when there is something to see.
#[test]
fn captured_tensors_are_searched_for_once() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let _alone = alone();
    for device in devices() {
        let holding = Holding::new(&device);
        let x = random([3, 4], &device).require_grad();
        let runs = [false, false, true, true, false, true].map(|is_tracked| {
            RUNS.store(0, Ordering::Relaxed);
            drop(checkpoint(&holding, x.clone(), move |holding, x| {
                RUNS.fetch_add(1, Ordering::Relaxed);
                let y = holding.forward(x);
                if is_tracked { y } else { y.detach() }
            }));
            RUNS.load(Ordering::Relaxed)
        });
        assert_eq!(runs, [1, 1, 2, 1, 1, 1]);
    }
}

/// Where no parameter and no input is tracked there is no segment, and a captured tensor gets its gradient.
#[test]
fn captured_tensors_of_frozen_modules() {
    let _alone = alone();
    for device in devices() {
        let holding = Holding::new(&device).freeze();
        let x = random([3, 4], &device);
        let fixed: &'static Tensor<2> = Box::leak(Box::new(random([3, 4], &device).require_grad()));
        let y = checkpoint(&holding, x, move |_, x| x * fixed.clone());
        assert!(y.is_tracked());
        assert!(fixed.grad(&y.sum().backward()).is_some());
    }
}

/// The forward pass that looks for captured tensors is not seen by those who listen.
#[test]
fn nobody_hears_of_the_search() {
    let _alone = alone();
    for device in devices() {
        let run = |holding: &Holding| {
            let x = random([3, 4], &device).require_grad();
            let forward = |holding: &Holding, x| checkpoint(holding, x, |holding, x| holding.forward(x));
            let (y, ledger) = ledger(holding, x, forward);
            y.sum().backward();
            ledger.to_string()
        };
        let holding = Holding::new(&device);
        drop(holding.forward(random([3, 4], &device)));
        assert_eq!(run(&holding), run(&holding));
    }
}

/// Shapes and dtypes of outputs are compared though their elements may not be. In a process of its own: in this one no elements would
/// be compared any more.
#[test]
fn outputs_of_another_shape_where_tensors_come_back_rounded() {
    let _alone = alone();
    let name = "misuse::where_tensors_come_back_rounded";
    let test =
        Command::new(env::current_exe().expect("this test")).args([name, "--exact", "--ignored"]).output();
    let output = test.expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn where_tensors_come_back_rounded() {
    type Outputs = (Tensor<1, Int>, Tensor<2>, Tensor<2>);
    type Change = fn(&Vec<Dropout>, Tensor<2>) -> Outputs;
    fn outputs(x: Tensor<2>) -> Outputs {
        (x.clone().argmax(1).flatten(0, 1), x.clone() * 2.0, x * 3.0)
    }
    let changes: [(&str, Change, &str); 3] = [
        (
            "a shape",
            |_, x| {
                let (rows, y, z) = outputs(x);
                (rows, y, if is_first() { z } else { z.slice(0..2) })
            },
            "is Shape { dims: [2, 4] } of F32, in the place of Shape { dims: [3, 4] } of F32",
        ),
        (
            "a dtype",
            |_, x| {
                let (rows, y, z) = outputs(x);
                (rows, y, if is_first() { z } else { z.cast(FloatDType::F64) })
            },
            "is Shape { dims: [3, 4] } of F64, in the place of Shape { dims: [3, 4] } of F32",
        ),
        (
            "the shape of integers",
            |_, x| {
                let (rows, y, z) = outputs(x);
                (if is_first() { rows } else { rows.slice(0..1) }, y, z)
            },
            "is Shape { dims: [1] }",
        ),
    ];
    let _alone = alone();
    for device in devices() {
        // From now on elements are not compared.
        let x = random([64, 64], &device).require_grad();
        SavedPolicy::Int8.scope(|| F::silu(x * 2.0)).sum().backward();
        for (what, change, expected) in changes {
            TIMES.store(0, Ordering::Relaxed);
            let x = random([3, 4], &device).require_grad();
            let (_, y, _) = checkpoint(&Vec::<Dropout>::new(), x, change);
            let message = message(y);
            assert!(message.contains(expected), "{what}: {message}");
        }
    }
}
