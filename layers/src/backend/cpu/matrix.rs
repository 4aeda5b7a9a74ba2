//! [`Matrix`]: a view of elements.
use burn::tensor::Shape;

/// A matrix in memory.
#[derive(Clone, Copy)]
pub struct Matrix<'a, E> {
    pub(super) values: &'a [E],
    /// Rows and columns.
    pub(super) size: [usize; 2],
    /// From a row to the next one, and from a column to the next one.
    pub(super) strides: [usize; 2],
}

impl<'a, E> Matrix<'a, E> {
    /// A tensor as a matrix of all its rows; `None` if it has no such view or is empty.
    pub(crate) fn of_rows(values: &'a [E], shape: &Shape, strides: &[usize]) -> Option<Self> {
        let columns = shape.num_dims().checked_sub(1)?;
        let (mut rows, mut stride) = (1, 0);
        for axis in (0..columns).rev().filter(|&axis| shape[axis] != 1) {
            if rows == 1 {
                stride = strides[axis];
            } else if strides[axis] != rows * stride {
                return None;
            }
            rows *= shape[axis];
        }
        let (size, strides) = ([rows, shape[columns]], [stride, strides[columns]]);
        let last = rows.checked_sub(1)? * strides[0] + shape[columns].checked_sub(1)? * strides[1];
        (last < values.len()).then_some(Self { values, size, strides })
    }

    /// Elements in row-major order; `None` if there are none.
    pub(crate) fn in_order(values: &'a [E], [rows, columns]: [usize; 2]) -> Option<Self> {
        Self::of_rows(values, &Shape::new([rows, columns]), &[columns, 1])
    }

    pub(crate) fn rows(&self) -> usize {
        self.size[0]
    }

    pub(crate) fn columns(&self) -> usize {
        self.size[1]
    }

    pub(crate) fn transpose(self) -> Self {
        let ([rows, columns], [row, column]) = (self.size, self.strides);
        Self { size: [columns, rows], strides: [column, row], ..self }
    }
}
