//! The inner loops of convolutions, in the widest vectors of the machine: products of rows with a block of columns, and sums of products
//! of two slices.
use core::ops::{Deref, DerefMut, Range};
use num_traits::Zero;
use pulp::{Arch, Simd, WithSimd};

/// Columns of a tile. On every machine it is a multiple of the four vectors that a product sums at once.
pub(crate) const COLUMNS: usize = 64;

/// A multiple of the lanes of every machine.
pub(crate) const MOST_LANES: usize = 16;

/// Bytes of a cache line. A vector that lies across two lines takes longer to read.
const LINE: usize = 64;

/// Memory for columns or sums that begins where a cache line does.
pub(crate) struct Workspace<A> {
    values: Vec<A>,
    range: Range<usize>,
}

impl<A: Lanes> Workspace<A> {
    /// `len` zeros.
    pub(crate) fn new(len: usize) -> Self {
        let slack = LINE / size_of::<A>();
        let values = vec![A::zero(); len + slack];
        let first = values.as_ptr().align_offset(LINE).min(slack);
        Self { values, range: first..first + len }
    }
}

impl<A> Deref for Workspace<A> {
    type Target = [A];

    fn deref(&self) -> &[A] {
        &self.values[self.range.clone()]
    }
}

impl<A> DerefMut for Workspace<A> {
    fn deref_mut(&mut self) -> &mut [A] {
        &mut self.values[self.range.clone()]
    }
}

/// Rows that begin at any positions, `starts`.
#[derive(Clone, Copy)]
pub(crate) struct RowsAt<'a, A> {
    pub(crate) values: &'a [A],
    pub(crate) starts: &'a [usize],
}

/// The starts of `count` rows that are `pitch` elements apart.
pub(crate) fn starts(count: usize, pitch: usize) -> Vec<usize> {
    (0..count).map(|row| row * pitch).collect()
}

/// Rows of sums that begin `pitch` elements apart. If this is the `first` summand, it overwrites what they hold.
pub(crate) struct SumRows<'a, A> {
    pub(crate) values: &'a mut [A],
    pub(crate) pitch: usize,
    pub(crate) first: bool,
}

/// A type in which products are summed, in vectors.
pub trait Lanes: Copy + Zero + 'static {
    /// A vector of an instruction set.
    type Vector<S: Simd>: Copy;
    /// A vector of one value.
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;
    /// `a + b`
    fn plus<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// `a * b + c`, rounded once where the machine can.
    fn mul_add<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;
    /// The values as whole vectors; what is left is not in the result.
    fn vectors<S: Simd>(values: &[Self]) -> &[Self::Vector<S>];
    /// The same, to be changed.
    fn vectors_mut<S: Simd>(values: &mut [Self]) -> &mut [Self::Vector<S>];
    /// A vector of fewer values than it has lanes, with zeros in the others.
    fn partial<S: Simd>(simd: S, values: &[Self]) -> Self::Vector<S>;
    /// The sum over the lanes.
    fn sum<S: Simd>(simd: S, vector: Self::Vector<S>) -> Self;
}

macro_rules! lanes {
    (
        $float:ty, $vector:ident, $splat:ident, $add:ident, $mul_add:ident, $vectors:ident, $vectors_mut:ident, $partial:ident,
        $sum:ident
    ) => {
        impl Lanes for $float {
            type Vector<S: Simd> = S::$vector;
            #[inline(always)]
            fn splat<S: Simd>(simd: S, value: Self) -> S::$vector {
                simd.$splat(value)
            }
            #[inline(always)]
            fn plus<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$add(a, b)
            }
            #[inline(always)]
            fn mul_add<S: Simd>(simd: S, a: S::$vector, b: S::$vector, c: S::$vector) -> S::$vector {
                simd.$mul_add(a, b, c)
            }
            #[inline(always)]
            fn vectors<S: Simd>(values: &[Self]) -> &[S::$vector] {
                S::$vectors(values).0
            }
            #[inline(always)]
            fn vectors_mut<S: Simd>(values: &mut [Self]) -> &mut [S::$vector] {
                S::$vectors_mut(values).0
            }
            #[inline(always)]
            fn partial<S: Simd>(simd: S, values: &[Self]) -> S::$vector {
                simd.$partial(values)
            }
            #[inline(always)]
            fn sum<S: Simd>(simd: S, vector: S::$vector) -> $float {
                simd.$sum(vector)
            }
        }
    };
}
lanes!(
    f32,
    f32s,
    splat_f32s,
    add_f32s,
    mul_add_e_f32s,
    as_simd_f32s,
    as_mut_simd_f32s,
    partial_load_f32s,
    reduce_sum_f32s
);
lanes!(
    f64,
    f64s,
    splat_f64s,
    add_f64s,
    mul_add_e_f64s,
    as_simd_f64s,
    as_mut_simd_f64s,
    partial_load_f64s,
    reduce_sum_f64s
);

/// `sums[r][c] += sum_k rows[r][k] columns[k][c]` for all starts of `rows` and `columns`, and `c < width`. The loop works in whole vectors,
/// so it overwrites `sums` beyond `width`, up to the next multiple of a vector. The rows of `columns` and `sums` must reach that far.
pub(crate) fn add_product<A: Lanes>(
    rows: RowsAt<'_, A>,
    columns: RowsAt<'_, A>,
    width: usize,
    sums: SumRows<'_, A>,
) {
    Arch::new().dispatch(AddProduct { rows, columns, width, sums });
}

struct AddProduct<'a, A> {
    rows: RowsAt<'a, A>,
    columns: RowsAt<'a, A>,
    width: usize,
    sums: SumRows<'a, A>,
}

impl<A: Lanes> WithSimd for AddProduct<'_, A> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let lanes = size_of::<A::Vector<S>>() / size_of::<A>();
        let mut first = 0;
        while first < self.width {
            let vectors = (self.width - first).div_ceil(lanes);
            // As many accumulators as fit into the registers.
            let done = match vectors {
                4.. if S::REGISTER_COUNT >= 32 => self.columns_from::<S, 4>(simd, first),
                2.. => self.columns_from::<S, 2>(simd, first),
                _ => self.columns_from::<S, 1>(simd, first),
            };
            first += done * lanes;
        }
    }
}

impl<A: Lanes> AddProduct<'_, A> {
    /// All rows of `V` vectors of columns; returns `V`.
    #[inline(always)]
    fn columns_from<S: Simd, const V: usize>(&mut self, simd: S, first: usize) -> usize {
        let (mut row, count) = (0, self.rows.starts.len());
        while row < count {
            row += match count - row {
                6.. => self.block::<S, 6, V>(simd, row, first),
                2.. => self.block::<S, 2, V>(simd, row, first),
                _ => self.block::<S, 1, V>(simd, row, first),
            };
        }
        V
    }

    /// `R` rows of `V` vectors of columns, summed in registers; returns `R`.
    #[inline(always)]
    fn block<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, row: usize, first: usize) -> usize {
        let RowsAt { values, starts } = self.columns;
        let rows: [&[A]; R] =
            core::array::from_fn(|r| &self.rows.values[self.rows.starts[row + r]..][..starts.len()]);
        let mut sums = [[A::splat(simd, A::zero()); V]; R];
        for (k, start) in starts.iter().enumerate() {
            let columns = &A::vectors::<S>(&values[start + first..])[..V];
            for r in 0..R {
                let factor = A::splat(simd, rows[r][k]);
                for v in 0..V {
                    sums[r][v] = A::mul_add(simd, factor, columns[v], sums[r][v]);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let totals = &mut self.sums.values[(row + r) * self.sums.pitch..][first..];
            for (total, &sum) in A::vectors_mut::<S>(totals)[..V].iter_mut().zip(sums) {
                *total = if self.sums.first { sum } else { A::plus(simd, *total, sum) };
            }
        }
        R
    }
}

/// A run of elements in one factor and the run in the other that it is multiplied with, element by element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairedRun {
    pub(crate) starts: [usize; 2],
    pub(crate) len: usize,
}

/// `sums[t] += sum_i a[i] b[shifts[t] + i]` over the elements of all runs, in as many partial sums as a vector has lanes (one
/// where the machine has no vectors that `pulp` knows).
pub(crate) fn add_dots<A: Lanes>(a: &[A], b: &[A], runs: &[PairedRun], shifts: &[usize], sums: &mut [A]) {
    Arch::new().dispatch(AddDots { a, b, runs, shifts, sums });
}

struct AddDots<'a, A> {
    a: &'a [A],
    b: &'a [A],
    runs: &'a [PairedRun],
    shifts: &'a [usize],
    sums: &'a mut [A],
}

impl<A: Lanes> WithSimd for AddDots<'_, A> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let mut first = 0;
        while first < self.shifts.len() {
            first += match self.shifts.len() - first {
                9.. => self.shifts_from::<S, 9>(simd, first), // a kernel of 3x3
                3.. => self.shifts_from::<S, 3>(simd, first),
                _ => self.shifts_from::<S, 1>(simd, first),
            };
        }
    }
}

impl<A: Lanes> AddDots<'_, A> {
    /// `T` shifts, summed in registers; returns `T`.
    #[inline(always)]
    fn shifts_from<S: Simd, const T: usize>(&mut self, simd: S, first: usize) -> usize {
        let lanes = size_of::<A::Vector<S>>() / size_of::<A>();
        let mut sums = [A::splat(simd, A::zero()); T];
        for PairedRun { starts: [a, b], len } in self.runs {
            let a = &self.a[*a..][..*len];
            let b: [&[A]; T] = core::array::from_fn(|t| &self.b[b + self.shifts[first + t]..][..*len]);
            let whole = A::vectors::<S>(a);
            let vectors: [&[A::Vector<S>]; T] = b.map(|b| &A::vectors::<S>(b)[..whole.len()]);
            for (index, &factor) in whole.iter().enumerate() {
                for t in 0..T {
                    sums[t] = A::mul_add(simd, factor, vectors[t][index], sums[t]);
                }
            }
            let done = whole.len() * lanes;
            if done < *len {
                let factor = A::partial(simd, &a[done..]);
                for t in 0..T {
                    sums[t] = A::mul_add(simd, factor, A::partial(simd, &b[t][done..]), sums[t]);
                }
            }
        }
        for (total, sum) in self.sums[first..].iter_mut().zip(sums) {
            *total = *total + A::sum(simd, sum);
        }
        T
    }
}
