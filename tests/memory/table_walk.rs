//! Tests the bytes of every row of the table: kept bytes and the ledger's total are exactly as the row says, and neither kept bytes nor
//! peak are above those of its twin, in all cases, types and strategies.
//!
//! Kept bytes are compared as the difference of two sizes. So what does not grow with the batch (the graph's own records, tensors of one
//! element per channel) cancels out, and every other byte has to be accounted for.
use crate::meter::{RECORDS, SCRATCH, alone, bytes, devices, measure};
use crate::table::{self, Case, Check, Input, Notes, Row, Visitor, run::Setting};
use burn::module::Module;
use burn::tensor::{DType, Device, GradientCheckpointingStrategy, Tensor};
use burn_memsave::measure::ledger;
use std::fmt::Display;

/// Of every layer that keeps tensors of one element per channel, and these are three at most: statistics, gamma or alpha.
const CHANNELS: usize = 8;

/// Of the element types that Flex computes with.
const DTYPES: [DType; 3] = [DType::F32, DType::F64, DType::F16];

/// One test per family.
macro_rules! families {
    ($($family:ident),+) => {$(
        #[test]
        fn $family() {
            let _alone = alone();
            let mut bytes = Bytes::default();
            table::$family::visit(&mut bytes);
            assert!(bytes.failures.is_empty(), "{}", bytes.failures.join("\n"));
        }
    )+};
}
table::families!(families);

#[derive(Default)]
struct Bytes {
    failures: Vec<String>,
}

impl Visitor for Bytes {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: Row<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>,
    {
        if row.notes.leaves_out(Check::Bytes, &row.name) {
            return;
        }
        println!("{}", row.name);
        // What gradient checkpointing changes does not depend on the type.
        let [plain, checkpointing] = &devices();
        let dtypes = if row.notes.only_f32.is_some() { &DTYPES[..1] } else { &DTYPES };
        let settings = dtypes.iter().map(|&dtype| (plain, dtype)).chain([(checkpointing, DTYPES[0])]);
        for (device, dtype) in settings {
            for case in Case::ALL {
                let setting = Setting::new(device, case, dtype);
                let stock = setting.cast((row.stock.init)(device, row.shapes.test));
                let ours = M::from(stock.clone());
                let claim = Claim { setting, shape: row.shapes.test, kept: &row.kept, notes: &row.notes };
                let failures = claim.check(
                    &|x| (row.stock.forward)(&stock, x),
                    &|x| (row.ours.forward)(&ours, x),
                    &|x| ledger(&ours, x, |ours, x| (row.ours.forward)(ours, x)).1.total(),
                );
                let place = format!(
                    "{} of {:?}, {dtype:?}, {case:?}, {:?}",
                    row.name,
                    row.shapes.test,
                    device.gradient_checkpointing_strategy()
                );
                self.failures.extend(failures.into_iter().map(|failure| format!("{place}: {failure}")));
            }
        }
    }
}

/// What a row says in a setting.
struct Claim<'a, const D: usize> {
    setting: Setting,
    shape: [usize; D],
    kept: &'a dyn Fn(Case, Input<D>) -> usize,
    notes: &'a Notes,
}

impl<const D: usize> Claim<'_, D> {
    /// What does not hold of it. `total` is that of the ledger.
    fn check<const O: usize>(
        &self,
        stock: &dyn Fn(Tensor<D>) -> Tensor<O>,
        ours: &dyn Fn(Tensor<D>) -> Tensor<O>,
        total: &dyn Fn(Tensor<D>) -> u64,
    ) -> Vec<String> {
        let Setting { case, dtype, device, .. } = &self.setting;
        let mut doubled = self.shape;
        doubled[0] *= 2;
        let inputs = [self.shape, doubled].map(|shape| Input { shape, dtype: *dtype });
        let random = |input: Input<D>, device: &Device| input.random(device).set_require_grad(case.input());
        let measure_one = |input: Input<D>, forward: &dyn Fn(Tensor<D>) -> Tensor<O>| match self.notes.summed
        {
            false => measure(device, || random(input, device), forward),
            // The sum does not keep what it sums: the output lives for the layer only.
            true => measure(device, || random(input, device), |x| forward(x).sum_dim(O - 1)),
        };
        let mut failures = vec![];
        let mut expect = |holds: bool, failure: String| failures.extend((!holds).then_some(failure));

        let [small, large] = inputs.map(|input| measure_one(input, ours));
        let grown = bytes(large.kept) - bytes(small.kept);
        let counted = inputs.map(|input| total(random(input, device)) as i64);
        let counted_growth = counted[1] - counted[0];
        if self.notes.unstated.is_none() {
            let said = inputs.map(|input| (self.kept)(*case, input) as i64);
            let growth = said[1] - said[0];
            expect(grown == growth, format!("keeps {grown} bytes more, not {growth}"));
            expect(counted_growth == growth, format!("the ledger's totals are {counted:?}, not {said:?}"));
            let per_channel = 0..=(3 * CHANNELS * dtype.size()) as i64;
            expect(
                per_channel.contains(&(counted[0] - said[0])),
                format!("the ledger's total is {}", counted[0]),
            );
        } else if device.gradient_checkpointing_strategy() != Some(GradientCheckpointingStrategy::Balanced) {
            expect(
                grown == counted_growth,
                format!("keeps {grown} bytes more, in the ledger {counted_growth}"),
            );
        }

        let twin = measure_one(inputs[1], stock);
        let (ours, of_stock) = (bytes(large.kept), bytes(twin.kept));
        expect(ours <= of_stock + RECORDS, format!("kept {ours} bytes, stock {of_stock}"));
        let (ours, of_stock) = (bytes(large.peak), bytes(twin.peak));
        if ours > of_stock + RECORDS {
            let small_twin = measure_one(inputs[0], stock);
            let growth = [ours - bytes(small.peak), of_stock - bytes(small_twin.peak)];
            let is_scratch = ours <= of_stock + SCRATCH && growth[0] <= growth[1] + 2 * RECORDS;
            match self.notes.known_peak.filter(|_| !case.input() && !is_scratch) {
                Some(why) => println!("known: peak {ours} bytes, stock {of_stock}: {why}"),
                None => expect(is_scratch, format!("peak {ours} bytes, stock {of_stock}")),
            }
        }
        failures
    }
}
