//! The device, and the text of a model of Hugging Face: its tokenizer, the tokens that end a text, and the form of conversations.
use burn::tensor::Device;
use burn_memsave::lazy::WeightFile;
use burn_memsave_models::tokenizer_of_gguf;
use serde::Deserialize;
use serde_json::Value;
use std::error::Error;
use std::fs;
use std::path::Path;
use tokenizers::Tokenizer;

/// The device of the feature `cuda` or `wgpu`, or else the CPU.
pub fn device() -> Device {
    #[cfg(feature = "cuda")]
    let device = Device::cuda(0);
    #[cfg(all(feature = "wgpu", not(feature = "cuda")))]
    let device = Device::wgpu(burn::tensor::DeviceKind::DefaultDevice);
    #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
    let device = Device::flex();
    device
}

/// The tokenizer in the directory of a model, or in a GGUF file. Like `transformers`, it neither pads nor truncates, whatever its file says.
pub fn tokenizer(model: &Path) -> Result<Tokenizer, Box<dyn Error>> {
    if model.is_file() {
        return Ok(tokenizer_of_gguf(&WeightFile::open(model)?)?);
    }
    let path = model.join("tokenizer.json");
    let named = |error: tokenizers::Error| format!("{}: {error}", path.display());
    let mut tokenizer = Tokenizer::from_file(&path).map_err(named)?;
    tokenizer.with_padding(None).with_truncation(None).map_err(named)?;
    Ok(tokenizer)
}

/// What ends what somebody says.
const ENDS: [&str; 6] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<EOT>"];

/// The tokens that end a text.
pub fn ends(model: &Path) -> Result<Vec<u32>, Box<dyn Error>> {
    if model.is_file() {
        let metadata = metadata(model)?;
        let ends = ["eos_token_id", "eot_token_id", "eom_token_id"];
        let ends = ends.iter().filter_map(|name| metadata[&format!("tokenizer.ggml.{name}")].as_u64());
        // Some files do not say that these end what is said in a conversation.
        let tokens = metadata["tokenizer.ggml.tokens"].as_array().into_iter().flatten();
        let named =
            tokens.enumerate().filter(|(_, token)| token.as_str().is_some_and(|token| ENDS.contains(&token)));
        let named = named.map(|(id, _)| id as u64);
        return Ok(ends.chain(named).filter_map(|end| end.try_into().ok()).collect());
    }
    for name in ["generation_config.json", "config.json"] {
        let Ok(text) = fs::read_to_string(model.join(name)) else { continue };
        let config: Value = serde_json::from_str(&text).map_err(|error| format!("{name}: {error}"))?;
        let ends = match &config["eos_token_id"] {
            Value::Array(ends) => ends.clone(),
            end => vec![end.clone()],
        };
        let ends: Vec<u32> = ends.iter().filter_map(|end| end.as_u64()?.try_into().ok()).collect();
        if !ends.is_empty() {
            return Ok(ends);
        }
    }
    Ok(vec![])
}

/// What a GGUF file says of its model.
fn metadata(file: &Path) -> Result<Value, Box<dyn Error>> {
    let metadata = WeightFile::open(file)?.read_metadata()?;
    let malformed = || format!("{}: it is not in the format GGUF", file.display());
    Ok(Value::Object(metadata.ok_or_else(malformed)?))
}

/// What somebody says in a conversation.
#[derive(Clone, Debug, Deserialize)]
pub struct Message {
    role: String,
    content: String,
}

impl Message {
    #[allow(dead_code)] // of the example that generates
    pub fn of_user(content: &str) -> Self {
        Self { role: "user".into(), content: content.into() }
    }
}

/// The form of conversations: a template of Jinja.
pub struct ChatTemplate {
    template: String,
    /// `tokenizer_config.json`, in which special tokens have names.
    config: Value,
}

impl ChatTemplate {
    pub fn read(model: &Path) -> Result<Self, Box<dyn Error>> {
        let missing = || format!("{}: there is no template of conversations", model.display());
        if model.is_file() {
            let metadata = metadata(model)?;
            let template = metadata["tokenizer.chat_template"].as_str().ok_or_else(missing)?.to_owned();
            let token = |name: &str| {
                let id = metadata[&format!("tokenizer.ggml.{name}_id")].as_u64()?;
                Some((name.to_owned(), metadata["tokenizer.ggml.tokens"].get(id as usize)?.clone()))
            };
            let special = ["bos_token", "eos_token"].into_iter().filter_map(token);
            return Ok(Self { template, config: Value::Object(special.collect()) });
        }
        let path = model.join("tokenizer_config.json");
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let config: Value =
            serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        let template = match (fs::read_to_string(model.join("chat_template.jinja")), &config["chat_template"])
        {
            (Ok(template), _) => Some(template),
            (_, Value::String(template)) => Some(template.clone()),
            // Several with names.
            (_, Value::Array(templates)) => {
                let default = templates.iter().find(|template| template["name"] == "default");
                default.and_then(|template| template["template"].as_str()).map(str::to_owned)
            }
            _ => None,
        };
        match template {
            Some(template) => Ok(Self { template, config }),
            None => Err(missing().into()),
        }
    }

    /// A conversation as the model reads it; with `goes_on`, up to where the model answers.
    pub fn apply(&self, messages: &[Message], goes_on: bool) -> Result<String, Box<dyn Error>> {
        let mut environment = minijinja::Environment::new();
        let syntax =
            minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message))
        });
        let special = |name: &str| match &self.config[name] {
            Value::String(token) => token.clone(),
            token => token["content"].as_str().unwrap_or_default().to_owned(),
        };
        let messages = messages.iter().map(|Message { role, content }| {
            minijinja::context! { role => role, content => content }
        });
        let context = minijinja::context! {
            messages => messages.collect::<Vec<_>>(),
            add_generation_prompt => goes_on,
            bos_token => special("bos_token"),
            eos_token => special("eos_token"),
        };
        Ok(environment.render_str(&self.template, context)?)
    }
}
