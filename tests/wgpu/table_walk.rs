//! Every row of the table on wgpu and on Flex.
use crate::table::{
    self, Case, Check, Row, Visitor,
    closeness::Closeness,
    run::{Layer, Named, Setting, outcome, parameter_gradients},
};
use crate::{among_others, gpu, of_products};
use burn::module::Module;
use burn::tensor::{DType, Device};
use std::fmt::Display;

/// Outputs and all gradients, in every case.
#[test]
fn every_layer_equals_flex() {
    let _shared = among_others();
    let mut layers = Layers::default();
    table::visit(&mut layers);
    assert!(layers.failures.is_empty(), "{}", layers.failures.join("\n"));
}

#[derive(Default)]
struct Layers {
    failures: Vec<String>,
}

impl Visitor for Layers {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: Row<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>,
    {
        if row.notes.leaves_out(Check::Wgpu, &row.name) {
            return;
        }
        println!("{}", row.name);
        let run = |device: Device, case| {
            let setting = Setting::new(&device.autodiff(), case, DType::F32).on(row.notes.inputs());
            let stock = setting.fill((row.stock.init)(&setting.device, row.shapes.test));
            let ours = M::from(stock);
            let forward = |x| (row.ours.forward)(&ours, x);
            let gradients = |gradients: &_| parameter_gradients(&ours, gradients);
            outcome(&Layer { forward: &forward, gradients: &gradients }, &setting, row.shapes.test)
        };
        for case in Case::ALL {
            // As on the CPU, but for the roundings of products.
            let tolerance = f64::from(of_products()) * if row.notes.cancels.is_some() { 3.0 } else { 1.0 };
            let failures = differences(run(gpu(), case), run(Device::flex(), case), tolerance);
            let place = format!("{} of {:?}, {case:?}", row.name, row.shapes.test);
            self.failures.extend(failures.map(|failure| format!("{place}: {failure}")));
        }
    }
}

fn differences(wgpu: Vec<Named>, flex: Vec<Named>, tolerance: f64) -> impl Iterator<Item = String> {
    let lengths = (wgpu.len() != flex.len()).then(|| format!("{} results, Flex {}", wgpu.len(), flex.len()));
    lengths.into_iter().chain(wgpu.into_iter().zip(flex).filter_map(move |((what, wgpu), (_, flex))| {
        let difference = match (wgpu, flex) {
            (None, None) => return None,
            (Some(wgpu), Some(flex)) => Closeness::Relative(tolerance).compare(&wgpu, &flex, None).err()?,
            (Some(_), None) => "is there".into(),
            (None, Some(_)) => "is missing".into(),
        };
        Some(format!("{what}: {difference}"))
    }))
}
