//! [`WeightCheck`]: what of a file fits a module, found without reading a tensor.
use super::load::{find_fitting, module_type, unused, warning};
use super::targets::{Target, Targets};
use super::{LazyError, WeightFile};
use burn::module::Module;
use burn::tensor::Shape;
use std::fmt;

/// For so many parameters similar names are searched.
const SEARCHED: usize = 100;

/// What of a [`WeightFile`] fits a module. Displays as a list.
#[derive(Debug)]
pub struct WeightCheck {
    /// The parameters that a tensor fits.
    pub matched: Vec<MatchedParameter>,
    /// The parameters that the file has no tensor for.
    pub missing: Vec<MissingParameter>,
    /// Why tensors do not fit the parameters of their names: shapes, dtypes, tensors that cannot be read.
    pub misfits: Vec<LazyError>,
    /// The tensors of the file that have the name of no parameter.
    pub unused: Vec<String>,
    /// What fits but is likely to be wrong: square weights that PyTorch wrote, loaded without an adapter that transposes them.
    pub warnings: Vec<String>,
}

/// A parameter, and the tensor that fits it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatchedParameter {
    /// Its path in the module.
    pub path: String,
    /// The name of its tensor in the file.
    pub tensor: String,
}

/// A parameter that a file has no tensor for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingParameter {
    /// Its path in the module.
    pub path: String,
    /// Its shape.
    pub shape: Shape,
    /// Similar names in the file, the most similar one first, for the first hundred parameters that are missing.
    pub similar_names: Vec<String>,
}

impl WeightFile {
    /// What of this file fits a module, which may have been initialized only just now. Nothing is read, so all that can be wrong is found
    /// at once, where [`lazy_load`](super::LazyLoad::lazy_load) returns the first error.
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::tensor::Device;
    /// use burn_memsave::{lazy::WeightFile, nn::LinearConfig};
    ///
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("model.bpk");
    /// let device = Device::flex();
    /// LinearConfig::new(4, 8).with_bias(false).init(&device).save_file(&path)?;
    ///
    /// let check = WeightFile::open(&path)?.check(&LinearConfig::new(4, 8).init(&device));
    /// assert!(!check.is_complete());
    /// assert_eq!(check.missing[0].path, "bias");
    /// println!("{check}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn check(&self, module: &impl Module) -> WeightCheck {
        let mut targets = Targets::default();
        module.visit(&mut targets);
        let (mut matched, mut missing, mut misfits, mut warnings) = (vec![], vec![], vec![], vec![]);
        for target in targets.targets {
            let fitting = find_fitting(self, &target);
            let Target { path, containers, shape, reparameterized, .. } = target;
            if reparameterized {
                misfits.push(LazyError::Reparameterized { parameter: path });
                continue;
            }
            match fitting {
                Ok(Some((tensor, entry))) => {
                    warnings.extend(warning(self, &path, module_type(&containers), &entry));
                    matched.push(MatchedParameter { path, tensor });
                }
                Ok(None) => {
                    let is_searched = missing.len() < SEARCHED; // a search goes through all names
                    let similar_names = if is_searched { self.similar_names(&path) } else { vec![] };
                    missing.push(MissingParameter { path, shape, similar_names });
                }
                Err(error) => misfits.push(error),
            }
        }
        let misfitting = misfits.iter().filter_map(|misfit| match misfit {
            LazyError::Shape { tensor, .. }
            | LazyError::DType { tensor, .. }
            | LazyError::Tensor { tensor, .. } => Some(tensor),
            _ => None,
        });
        let unused = unused(self, matched.iter().map(|parameter| &parameter.tensor).chain(misfitting));
        WeightCheck { matched, missing, misfits, unused, warnings }
    }
}

impl WeightCheck {
    /// Whether a tensor fits each parameter.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.misfits.is_empty()
    }
}

impl fmt::Display for WeightCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters = self.matched.len() + self.missing.len() + self.misfits.len();
        write!(f, "{} of {parameters} parameters have a tensor that fits", self.matched.len())?;
        for MissingParameter { path, shape, similar_names } in &self.missing {
            write!(f, "\nno tensor for {path} {:?}", shape.as_slice())?;
            if !similar_names.is_empty() {
                write!(f, "; similar: {}", similar_names.join(", "))?;
            }
        }
        self.misfits.iter().try_for_each(|misfit| write!(f, "\n{misfit}"))?;
        self.warnings.iter().try_for_each(|warning| write!(f, "\nwarning: {warning}"))?;
        self.unused.iter().try_for_each(|name| write!(f, "\nno parameter for {name}"))
    }
}
