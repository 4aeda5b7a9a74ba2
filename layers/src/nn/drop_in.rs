//! What every drop-in module has in common.
use burn::module::{Content, ModuleDisplay};

/// Converts a module from its stock twin and back, field by field, and displays it as the twin does, under its long name.
///
/// The module itself has the name of the twin: by the names of modules, Burn's stores know what to transpose or rename in a
/// file of PyTorch.
///
/// The fields are listed once; a field that is missing here, or new in Burn, is a compile error.
///
/// `[field]` is a vector of modules.
macro_rules! drop_in {
    ($module:ident = $stock:path, $from:ident, $into:ident {
        $([$modules:ident],)* $($field:ident),* $(,)?
    }) => {
        drop_in!(@conversions $module = $stock, $from, $into { $([$modules],)* $($field),* });
        drop_in!(@display $module, $into);
    };
    // Where the stock module has private fields: the two conversions as functions.
    ($module:ident = $stock:path, $from:ident = $from_stock:expr, $into:ident = $into_stock:expr) => {
        impl $module {
            /// Converts the stock module; parameters keep their ids, values and settings, and stay shared with others.
            pub fn $from(stock: $stock) -> Self {
                $from_stock(stock)
            }

            /// Converts back to the stock module.
            pub fn $into(self) -> $stock {
                $into_stock(self)
            }
        }
        drop_in!(@from $module = $stock, $from, $into);
        drop_in!(@display $module, $into);
    };
    (@conversions $module:ident = $stock:path, $from:ident, $into:ident {
        $([$modules:ident],)* $($field:ident),* $(,)?
    }) => {
        impl $module {
            /// Converts the stock module; parameters keep their ids, values and settings, and stay shared with others.
            #[allow(clippy::useless_conversion)] // most fields have the same type in both
            pub fn $from(stock: $stock) -> Self {
                let $stock { $($modules,)* $($field),* } = stock;
                Self {
                    $($modules: $modules.into_iter().map(Into::into).collect(),)*
                    $($field: $field.into()),*
                }
            }

            /// Converts back to the stock module.
            #[allow(clippy::useless_conversion)]
            pub fn $into(self) -> $stock {
                let Self { $($modules,)* $($field),* } = self;
                $stock {
                    $($modules: $modules.into_iter().map(Into::into).collect(),)*
                    $($field: $field.into()),*
                }
            }
        }
        drop_in!(@from $module = $stock, $from, $into);
    };
    (@from $module:ident = $stock:path, $from:ident, $into:ident) => {
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
    // What is inside is displayed as what it is.
    (@display $module:ident) => {
        impl burn::module::ModuleDisplay for $module {
            fn custom_content(&self, content: burn::module::Content) -> Option<burn::module::Content> {
                let content = burn::module::ModuleDisplayDefault::content(self, content)?;
                Some(content.set_top_level_type(concat!("MemSave", stringify!($module))))
            }
        }
    };
    (@display $module:ident, $into:ident) => {
        impl burn::module::ModuleDisplay for $module {
            fn custom_settings(&self) -> Option<burn::module::DisplaySettings> {
                burn::module::ModuleDisplay::custom_settings(&self.clone().$into())
            }
            fn custom_content(&self, content: burn::module::Content) -> Option<burn::module::Content> {
                let stock = self.clone().$into();
                crate::nn::drop_in::display(&stock, content, concat!("MemSave", stringify!($module)))
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

/// Converts a config from its stock twin and back, field by field.
macro_rules! config_twin {
    ($config:ident = $stock:path { $($field:ident),* $(,)? }) => {
        crate::nn::drop_in::config_into_stock!($config = $stock { $($field),* });

        impl From<$stock> for $config {
            fn from(config: $stock) -> Self {
                let $stock { $($field),* } = config;
                Self { $($field),* }
            }
        }
    };
}
pub(crate) use config_twin;

/// Converts a config to its stock twin, field by field.
macro_rules! config_into_stock {
    ($config:ident = $stock:path { $($field:ident),* $(,)? }) => {
        #[allow(clippy::useless_conversion)] // most fields have the same type in both
        impl From<$config> for $stock {
            fn from(config: $config) -> Self {
                let $config { $($field),* } = config;
                $stock { $($field: $field.into()),* }
            }
        }
    };
}
pub(crate) use config_into_stock;

/// Implements `From<inner> for outer` for every variant of an enum that wraps one value.
macro_rules! wraps {
    ($outer:ident { $($variant:ident($inner:ty)),* $(,)? }) => {$(
        impl From<$inner> for $outer {
            fn from(inner: $inner) -> Self {
                Self::$variant(inner)
            }
        }
    )*};
}
pub(crate) use wraps;
