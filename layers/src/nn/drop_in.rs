//! The macros that define every drop-in module and its config, each from one list of fields.
//!
//! [`config_twin!`] and [`drop_in!`] take a struct as it is written in Rust, with the path of its twin in Burn next to its
//! name. A field that is missing from the list, or new in Burn, is a compile error.
use burn::module::{Content, ModuleDisplay};

/// Defines the config of a module: the struct, conversions from its stock twin and back, and `init`.
///
/// ```ignore
/// config_twin! {
///     #[derive(Config, Debug)]
///     pub struct LinearConfig = burn::nn::LinearConfig {
///         /// The size of the input features.
///         pub d_input: usize,
///     }
///     pub fn init(&self, device: &Device) -> Linear;
/// }
/// ```
///
/// `init` initializes the stock module and converts it. Its line ends with `, or panics` if the stock config refuses some
/// values. It ends with `= function` if the stock module has private fields: the function makes the module from the config and
/// the stock module.
macro_rules! config_twin {
    (
        #[derive($($derive:tt)*)] // tokens of the caller, so that a default can name another field
        pub struct $config:ident = $stock:path { $($fields:tt)* }
        pub fn init($($arguments:tt)*) -> $module:ident $(, or $panics:ident)? $(= $make:ident)?;
    ) => {
        #[doc = concat!("Configuration of [`", stringify!($module), "`]; the same as [`", stringify!($stock), "`].")]
        #[derive($($derive)*)]
        pub struct $config {
            $($fields)*
        }

        crate::nn::drop_in::config_twin!(@conversions $config = $stock { $($fields)* });

        impl $config {
            crate::nn::drop_in::config_twin!(@init
                /// Initializes the module, as the stock config does.
                $(#[doc = crate::nn::drop_in::config_twin!(@$panics)])?
                ($($arguments)*) -> $module, $stock $(, $make)?
            );
        }
    };
    (@conversions $config:ident = $stock:path {
        $($(#[$meta:meta])* pub $field:ident: $type:ty),* $(,)?
    }) => {
        #[allow(clippy::useless_conversion)] // most fields have the same type in both
        impl From<$stock> for $config {
            fn from(config: $stock) -> Self {
                let $stock { $($field),* } = config;
                Self { $($field: $field.into()),* }
            }
        }

        #[allow(clippy::useless_conversion)]
        impl From<$config> for $stock {
            fn from(config: $config) -> Self {
                let $config { $($field),* } = config;
                Self { $($field: $field.into()),* }
            }
        }
    };
    (@init $(#[$doc:meta])* (&self, device: &$device:ident) -> $module:ident, $stock:path $(, $make:ident)?) => {
        $(#[$doc])*
        pub fn init(&self, device: &$device) -> $module {
            let stock = <$stock>::from(self.clone()).init(device);
            crate::nn::drop_in::config_twin!(@make self, stock $(, $make)?)
        }
    };
    (@init $(#[$doc:meta])* (&self) -> $module:ident, $stock:path $(, $make:ident)?) => {
        $(#[$doc])*
        pub fn init(&self) -> $module {
            let stock = <$stock>::from(self.clone()).init();
            crate::nn::drop_in::config_twin!(@make self, stock $(, $make)?)
        }
    };
    (@init $(#[$doc:meta])* (self) -> $module:ident, $stock:path) => {
        $(#[$doc])*
        pub fn init(self) -> $module {
            <$stock>::from(self).init().into()
        }
    };
    (@make $config:ident, $module:ident) => { $module.into() };
    (@make $config:ident, $module:ident, $make:ident) => { $make($config, $module) };
    (@panics) => { "\n# Panics\n\nPanics for the values that the stock config refuses, with its message." };
}
pub(crate) use config_twin;

/// Defines a module: the struct, its long name, conversions from its stock twin and back, and its display, which is the twin's
/// under the long name.
///
/// ```ignore
/// drop_in! {
///     /// Dense layer.
///     #[derive(Module, Debug)]
///     pub struct Linear as MemSaveLinear = burn::nn::Linear, from_nn_linear, into_nn_linear {
///         /// Matrix of shape `[d_input, d_output]`
///         pub weight: Param<Tensor<2>>,
///     }
/// }
/// ```
///
/// The struct has the name of the twin, because Burn's stores decide by the names of modules what to transpose or rename in a
/// PyTorch file.
///
/// If the twin has private fields, name functions that convert: `from_nn_x = function, into_nn_x = function`. With
/// `own display`, inner modules are displayed under their long names.
macro_rules! drop_in {
    (
        $(#[$meta:meta])*
        pub struct $module:ident as $long:ident = $stock:path, $from:ident, $into:ident
            $(, $own:ident display)? { $($fields:tt)* }
    ) => {
        $(#[$meta])*
        #[module(custom_display)]
        pub struct $module {
            $($fields)*
        }

        crate::nn::drop_in::drop_in!(@fields $module as $long = $stock, $from, $into { $($fields)* });
        crate::nn::drop_in::drop_in!(@display $module as $long, $into $(, $own)?);
    };
    (
        $(#[$meta:meta])*
        pub struct $module:ident as $long:ident = $stock:path, $from:ident, $into:ident;
    ) => {
        $(#[$meta])*
        #[module(custom_display)]
        pub struct $module;

        impl $module {
            /// Creates the module.
            pub fn new() -> Self {
                Self
            }
        }

        crate::nn::drop_in::drop_in!(@fields $module as $long = $stock, $from, $into {});
        crate::nn::drop_in::drop_in!(@display $module as $long, $into);
    };
    (
        $(#[$meta:meta])*
        pub struct $module:ident as $long:ident = $stock:path,
            $from:ident = $from_stock:ident, $into:ident = $into_stock:ident
            $(, $own:ident display)? { $($fields:tt)* }
    ) => {
        $(#[$meta])*
        #[module(custom_display)]
        pub struct $module {
            $($fields)*
        }

        crate::nn::drop_in::drop_in!(
            @conversions $module as $long = $stock,
            $from(stock) { $from_stock(stock) },
            $into(module) { $into_stock(module) }
        );
        crate::nn::drop_in::drop_in!(@display $module as $long, $into $(, $own)?);
    };
    (@fields $module:ident as $long:ident = $stock:path, $from:ident, $into:ident {
        $($(#[$meta:meta])* pub $field:ident: $type:ty),* $(,)?
    }) => {
        crate::nn::drop_in::drop_in!(
            @conversions $module as $long = $stock,
            $from(stock) {
                let $stock { $($field),* } = stock;
                Self { $($field: crate::nn::drop_in::convert!($field)),* }
            },
            $into(module) {
                let Self { $($field),* } = module;
                $stock { $($field: crate::nn::drop_in::convert!($field)),* }
            }
        );
    };
    (
        @conversions $module:ident as $long:ident = $stock:path,
        $from:ident($theirs:ident) { $($from_stock:tt)* },
        $into:ident($ours:ident) { $($into_stock:tt)* }
    ) => {
        pub use self::$module as $long;

        impl $module {
            /// Converts the stock module. Parameters keep their ids, values and settings, and tied parameters stay tied.
            pub fn $from($theirs: $stock) -> Self {
                $($from_stock)*
            }

            /// Converts back to the stock module.
            pub fn $into(self) -> $stock {
                let $ours = self;
                $($into_stock)*
            }
        }

        impl From<$stock> for $module {
            fn from(stock: $stock) -> Self {
                Self::$from(stock)
            }
        }

        impl From<$module> for $stock {
            fn from(module: $module) -> Self {
                module.$into()
            }
        }
    };
    (@display $module:ident as $long:ident, $into:ident) => {
        impl burn::module::ModuleDisplay for $module {
            fn custom_settings(&self) -> Option<burn::module::DisplaySettings> {
                burn::module::ModuleDisplay::custom_settings(&self.clone().$into())
            }

            fn custom_content(&self, content: burn::module::Content) -> Option<burn::module::Content> {
                crate::nn::drop_in::display(&self.clone().$into(), content, stringify!($long))
            }
        }
    };
    (@display $module:ident as $long:ident, $into:ident, own) => {
        impl burn::module::ModuleDisplay for $module {
            fn custom_content(&self, content: burn::module::Content) -> Option<burn::module::Content> {
                let content = burn::module::ModuleDisplayDefault::content(self, content)?;
                Some(content.set_top_level_type(stringify!($long)))
            }
        }
    };
}
pub(crate) use drop_in;

/// What the stock module displays, under a long name.
pub(crate) fn display(stock: &impl ModuleDisplay, content: Content, name: &str) -> Option<Content> {
    let settings = content.display_settings.clone();
    let own = stock.custom_content(content);
    let content = own.or_else(|| stock.content(Content::new(settings.clone())));
    Some(content.unwrap_or_else(|| Content::new(settings)).set_top_level_type(name))
}

/// Converts the value of a field to its type in the twin; for a vector or an option, the values inside.
macro_rules! convert {
    ($field:ident) => {{
        #[allow(unused_imports)] // vectors and options have the method themselves
        use crate::nn::drop_in::Convert as _;
        crate::nn::drop_in::Field($field).convert()
    }};
}
pub(crate) use convert;

/// See [`convert!`].
pub(crate) struct Field<T>(pub T);

impl<T> Field<Option<T>> {
    pub(crate) fn convert<U: From<T>>(self) -> Option<U> {
        self.0.map(U::from)
    }
}

impl<T> Field<Vec<T>> {
    pub(crate) fn convert<U: From<T>>(self) -> Vec<U> {
        self.0.into_iter().map(U::from).collect()
    }
}

/// The method of every other [`Field`].
pub(crate) trait Convert<U> {
    fn convert(self) -> U;
}

impl<T: Into<U>, U> Convert<U> for Field<T> {
    fn convert(self) -> U {
        self.0.into()
    }
}

/// Defines an enum of modules of one kind and the enum of their configs, with conversions from their stock twins and back,
/// `init` and `forward`.
///
/// One line per variant names the module and initializes it: `Relu(Relu) => Relu::new();` or, with a config,
/// `PRelu(PRelu) from config: PReluConfig => config.init(device);`. A config variant without a module variant of its own stands
/// after `or`, on the line of the variant that it initializes.
macro_rules! any_of {
    (
        $(#[$meta:meta])*
        pub enum $module:ident as $long:ident = $stock:path, $from:ident, $into:ident;
        #[derive($($derive:tt)*)]
        pub enum $config:ident = $stock_config:path;
        $(#[$forward:meta])*
        pub fn forward;
        $device:ident:
        $(
            $variant:ident($type:ident) $(from $payload:ident: $payload_type:ident)? => $init:expr
            $(, or $more:ident ($more_doc:literal) => $more_init:expr)?;
        )*
    ) => {
        #[doc = concat!("Configuration of any [`", stringify!($module), "`]; the same as [`", stringify!($stock_config), "`].")]
        #[derive($($derive)*)]
        #[non_exhaustive]
        pub enum $config {
            $(
                #[doc = concat!("[`", stringify!($type), "`].")]
                $variant $(($payload_type))?,
                $(#[doc = $more_doc] $more,)?
            )*
        }

        $($(
            impl From<$payload_type> for $config {
                fn from(config: $payload_type) -> Self {
                    Self::$variant(config)
                }
            }
        )?)*

        impl $config {
            /// Initializes the module.
            pub fn init(&self, $device: &burn::tensor::Device) -> $module {
                match self {
                    $(
                        Self::$variant $(($payload))? => $init.into(),
                        $(Self::$more => $more_init.into(),)?
                    )*
                }
            }
        }

        impl From<$stock_config> for $config {
            /// # Panics
            ///
            /// Panics for a variant that Burn 0.22.1 does not have.
            fn from(config: $stock_config) -> Self {
                type Stock = $stock_config;
                match config {
                    $(
                        Stock::$variant $(($payload))? => Self::$variant $(($payload.into()))?,
                        $(Stock::$more => Self::$more,)?
                    )*
                    other => panic!("{other:?} is newer than burn 0.22.1"),
                }
            }
        }

        impl From<$config> for $stock_config {
            fn from(config: $config) -> Self {
                match config {
                    $(
                        $config::$variant $(($payload))? => Self::$variant $(($payload.into()))?,
                        $($config::$more => Self::$more,)?
                    )*
                }
            }
        }

        $(#[$meta])*
        #[non_exhaustive]
        pub enum $module {
            $(
                #[doc = concat!("[`", stringify!($type), "`].")]
                $variant($type),
            )*
        }

        $(
            impl From<$type> for $module {
                fn from(module: $type) -> Self {
                    Self::$variant(module)
                }
            }
        )*

        #[allow(clippy::useless_conversion)] // some variants hold modules of Burn
        impl $module {
            /// Converts the stock module. Parameters keep their ids, values and settings.
            ///
            /// # Panics
            ///
            /// Panics for a variant that Burn 0.22.1 does not have.
            pub fn $from(module: $stock) -> Self {
                type Stock = $stock;
                match module {
                    $(Stock::$variant(module) => Self::$variant(module.into()),)*
                    other => panic!("{}: {other:?} is newer than burn 0.22.1", stringify!($from)),
                }
            }

            /// Converts back to the stock module.
            pub fn $into(self) -> $stock {
                type Stock = $stock;
                match self {
                    $(Self::$variant(module) => Stock::$variant(module.into()),)*
                }
            }

            $(#[$forward])*
            pub fn forward<const D: usize>(&self, input: burn::tensor::Tensor<D>) -> burn::tensor::Tensor<D> {
                match self {
                    $(Self::$variant(module) => module.forward(input),)*
                }
            }
        }

        pub use self::$module as $long;

        impl From<$stock> for $module {
            fn from(module: $stock) -> Self {
                Self::$from(module)
            }
        }

        impl From<$module> for $stock {
            fn from(module: $module) -> Self {
                module.$into()
            }
        }
    };
}
pub(crate) use any_of;
