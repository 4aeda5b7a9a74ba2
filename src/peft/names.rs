//! [`ModuleNames`]: where modules are in Python, and in which order they have their outputs there.
use crate::lazy::{RowOrder, RowOrders};

/// The paths of modules in Python. A function from a path here to the path there is one: `|path: &str| path.replace("blocks", "layers")`.
pub trait ModuleNames {
    /// The path in Python of the module at this path here.
    fn name(&self, path: &str) -> String;

    /// The order of the outputs of the module at this path here, if it is another one than in Python. Factors, magnitudes and biases are
    /// reordered as the weight was when it was loaded.
    fn row_order(&self, path: &str) -> Option<RowOrder> {
        let _ = path;
        None
    }

    /// Whether the module at this path is a dense layer whose weight is `[inputs, outputs]` in Python, too: the `Conv1D` of GPT-2. Only
    /// [`save_merged`](super::save_merged) asks.
    fn has_inputs_first(&self, path: &str) -> bool {
        let _ = path;
        false
    }

    /// The same names for a module whose weights were loaded with these [`RowOrders`].
    ///
    /// ```
    /// use burn_memsave::lazy::{RowOrder, RowOrders};
    /// use burn_memsave::peft::ModuleNames;
    ///
    /// let orders = RowOrders::new().with(r"\.(query|key)$", RowOrder::rotary_pairs(64))?;
    /// let names = (|path: &str| path.replace(".query", ".q_proj")).with_row_orders(orders);
    /// assert_eq!(names.name("layers.0.query"), "layers.0.q_proj");
    /// assert_eq!(names.row_order("layers.0.query"), Some(RowOrder::rotary_pairs(64)));
    /// # Ok::<(), burn_memsave::lazy::LazyError>(())
    /// ```
    fn with_row_orders(self, orders: RowOrders) -> Reordered<Self>
    where
        Self: Sized,
    {
        Reordered { names: self, orders }
    }
}

impl<F: Fn(&str) -> String> ModuleNames for F {
    fn name(&self, path: &str) -> String {
        self(path)
    }
}

/// Made by [`ModuleNames::with_row_orders`].
#[derive(Clone, Debug)]
pub struct Reordered<N> {
    names: N,
    orders: RowOrders,
}

impl<N: ModuleNames> ModuleNames for Reordered<N> {
    fn name(&self, path: &str) -> String {
        self.names.name(path)
    }

    fn row_order(&self, path: &str) -> Option<RowOrder> {
        self.orders.get(path).or_else(|| self.names.row_order(path))
    }

    fn has_inputs_first(&self, path: &str) -> bool {
        self.names.has_inputs_first(path)
    }
}
