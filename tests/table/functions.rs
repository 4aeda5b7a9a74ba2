//! Rows of functions that do not belong to a layer.
use super::{Check, QUERIES, ROWS, Visitor, kept};
use burn::module::Module;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{activation, module};
use burn_memsave_paper::text::repeated;
use core::ops::Range;

/// The module that stands for a function.
#[derive(Module, Debug)]
pub struct Function;

/// A row of a function: `|x| ours => stock`, or one call that is made in our namespace and in another one.
macro_rules! function {
    ($visitor:ident, $name:expr, $shapes:expr, $kept:expr, $stock:ident, |$f:ident, $x:ident| $forward:expr
        $(, $note:ident ($($argument:expr),*))* $(,)?
    ) => {
        function! {
            $visitor, $name, $shapes, $kept,
            |$x| {
                use burn_memsave::functional as $f;
                $forward
            } => {
                use $stock as $f;
                $forward
            }
            $(, $note($($argument),*))*
        }
    };
    ($visitor:ident, $name:expr, $shapes:expr, $kept:expr, |$x:ident| $ours:expr => $stock:expr
        $(, $note:ident ($($argument:expr),*))* $(,)?
    ) => {
        $visitor.row($crate::table::Row {
            name: String::from($name),
            shapes: $shapes,
            kept: Box::new($kept),
            stock: $crate::table::Twin {
                init: Box::new(|_, _| $crate::table::functions::Function),
                forward: Box::new(|_, $x| $stock),
            },
            ours: $crate::table::Twin {
                init: Box::new(|_, _| $crate::table::functions::Function),
                forward: Box::new(|_, $x| $ours),
            },
            notes: $crate::table::Notes::default()
                .without(&[$crate::table::Check::Conversion], "a function")$(.$note($($argument),*))*,
        })
    };
}
pub(super) use function;

pub fn visit(visitor: &mut impl Visitor) {
    const VARIANT: &[Check] = &[Check::Time];
    function! {
        visitor, "softmax", ROWS, kept::input, activation, |f, x| f::softmax(x, 2), summed()
    }
    function! {
        visitor, "softmax, first axis", ROWS, kept::input, activation, |f, x| f::softmax(x, 0), summed(),
        known_peak("16 bytes per column of its own, more than a few rows need in place")
    }
    function! {
        visitor, "log_softmax", ROWS, kept::input, activation, |f, x| f::log_softmax(x, 2), summed()
    }
    function! {
        visitor, "softmin", ROWS, kept::input, activation, |f, x| f::softmin(x, 2), summed(),
        without(VARIANT, "as softmax")
    }
    function! {
        visitor, "quiet_softmax", ROWS, kept::input, activation, |f, x| f::quiet_softmax(x, 2), summed(),
        without(VARIANT, "as softmax")
    }
    // The input is kept; queries, keys and values are views of it.
    for (name, is_causal) in [("attention", false), ("attention, causal", true)] {
        function! {
            visitor, name, QUERIES, kept::input, module, |f, x| {
                let heads = x.dims()[1] / 3;
                let [query, key, value] =
                    [0, 1, 2].map(|part| x.clone().slice_dim(1, part * heads..(part + 1) * heads));
                let options = AttentionModuleOptions { is_causal, ..Default::default() };
                f::attention(query, key, value, None, None, options)
            }
        }
    }
    // Two thirds of the input are heads of queries. Every four of them share one head of keys and one of values.
    function! {
        visitor, "attention, grouped", QUERIES.test([2, 12, 9, 8]), kept::input, repeated, |f, x| {
            let sixth = x.dims()[1] / 6;
            let heads = |range: Range<usize>| x.clone().slice_dim(1, range.start * sixth..range.end * sixth);
            let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
            f::attention(heads(0..4), heads(4..5), heads(5..6), None, None, options)
        },
        without(VARIANT, "as causal attention")
    }
}
