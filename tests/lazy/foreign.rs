//! Tests files as other programs write and name them: directories of trainers, wrappers, fused and split tensors, tensors that are not read.
use crate::archives::{View, write};
use crate::{Saved, all, devices, load, open};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData, Tolerance};
use burn_memsave::lazy::{
    LazyError, LazyLoad, LazyOptions, PrepareOptions, PrepareSource, RowOrder, RowOrders, WeightFile, prepare,
};
use burn_memsave::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn_memsave::nn::conv::{Conv1d, Conv1dConfig};
use burn_memsave::nn::{
    BiLstm, BiLstmConfig, Embedding, EmbeddingConfig, Gru, GruConfig, Linear, LinearConfig, Lstm, LstmConfig,
    PaddingConfig1d, Rnn, RnnConfig,
};
use safetensors::tensor::{Dtype, TensorView};
use serde::Deserialize;
use std::path::{Path, PathBuf};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lazy/data").join(name)
}

fn linear(width: usize) -> Linear {
    LinearConfig::new(width, 3).init(&Device::flex())
}

fn names(file: &WeightFile) -> Vec<&str> {
    file.tensors().map(|tensor| tensor.name).collect()
}

fn values(file: &WeightFile, name: &str) -> Vec<f32> {
    file.read(name).unwrap().try_into_vec().unwrap()
}

/// Writes vectors and matrices as safetensors.
fn write_floats(path: &Path, tensors: &[(&str, &[usize], &[f32])]) {
    let views = tensors.iter().map(|(name, shape, values)| {
        (*name, TensorView::new(Dtype::F32, shape.to_vec(), bytemuck::cast_slice(values)).unwrap())
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn directories_of_trainers() {
    let saved = Saved::new(&linear(2));
    let directory = saved.directory.path().join("run");
    std::fs::create_dir(&directory).unwrap();
    let put = |from: &str, name: &str| _ = std::fs::copy(saved.path(from), directory.join(name)).unwrap();
    let text = |name: &str| std::fs::write(directory.join(name), "{}").unwrap();
    let reason = || WeightFile::open(&directory).unwrap_err().to_string();

    text("config.json");
    assert!(reason().contains("without weights") && reason().contains("it has config.json"), "{}", reason());
    for other in
        ["training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "adapter_model.safetensors"]
    {
        text(other);
    }
    assert!(reason().contains("without weights"), "{}", reason());
    put("model.safetensors", "model.fp16.safetensors");
    assert_eq!(open(&directory).tensors().len(), 2, "a variant alone");
    put("model.safetensors", "other.safetensors");
    assert!(reason().contains("open one of them: model.fp16.safetensors, other.safetensors"), "{}", reason());
    put("model.safetensors", "pytorch_model.bin");
    text("pytorch_model.bin.index.json");
    assert_eq!(open(&directory).tensors().len(), 2, "a usual name, whatever is beside it");
    put("model.bpk", "model.safetensors");
    assert!(open(&directory).tensors().len() == 2, "by its content, not by its name");

    let config = WeightFile::open(directory.join("config.json")).unwrap_err().to_string();
    assert!(config.contains("JSON, but no index of shards: missing field `weight_map`"), "{config}");
}

#[test]
fn names_in_wrappers() {
    let eager = linear(2);
    let saved = Saved::new(&eager);
    for prefix in ["module.", "_orig_mod.", "base_model.model.", "module._orig_mod.", "_orig_mod.module."] {
        let file = saved.safetensors().with_key_remapping("^", prefix).unwrap();
        assert!(names(&file).iter().all(|name| name.starts_with(prefix)), "names stay");
        let (lazy, report) = load(linear(2), &file, &all());
        assert_eq!(report.unused, [""; 0]);
        assert_eq!(lazy.weight.val().into_data(), eager.weight.val().into_data());
        assert_eq!(file.read("weight").unwrap(), eager.weight.val().into_data());
    }
    // A module may be called so, also in a wrapper.
    #[derive(Module, Debug)]
    struct Wrapper {
        module: Linear,
    }
    let file = saved.safetensors().with_key_remapping("^", "module.module.").unwrap();
    load(Wrapper { module: linear(2) }, &file, &all());
    let file = saved.safetensors().with_key_remapping("^bias", "module.bias").unwrap();
    assert!(linear(2).lazy_load(&file, &all()).is_err());
}

#[test]
fn keys_of_trainers() {
    let whole = |name, storage| View::whole(name, storage, &[2, 3]);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("checkpoint.pt");
    let numbers = |first: usize| TensorData::new((first..first + 6).map(|x| x as f32).collect(), [6]);
    let views = [whole("model.weight", 0), whole("optimizer.weight", 1)];
    write(&path, &views, &[numbers(0), numbers(6)]);
    let file = open(&path).with_key("model").unwrap();
    assert_eq!((names(&file), values(&file, "weight")[0]), (vec!["weight"], 0.0));
    let error = open(&path).with_key("mode").unwrap_err().to_string();
    assert!(error.contains("no tensors under the key mode; it has the keys model, optimizer"), "{error}");
}

#[test]
fn replacements_that_replace_nothing() {
    let saved = Saved::new(&linear(2));
    let error = |from, to| saved.safetensors().with_key_remapping(from, to).unwrap_err().to_string();
    assert!(
        error("^layer", "l").contains("none of the 2 names, such as bias, weight"),
        "{}",
        error("^layer", "l")
    );
    let group = error("(w)eight", "$1_x");
    assert!(group.contains("its group \"1_x\"") && group.contains("${1}"), "{group}");
    let clash = error("weight|bias", "same");
    assert!(clash.contains("bias and weight would both be called same"), "{clash}");
    let table = [("^layer", "l"), ("^bias", "b")];
    assert_eq!(names(&saved.safetensors().with_key_remappings(&table).unwrap()), ["b", "weight"]);
    assert_eq!(names(&saved.safetensors().with_key_remappings(&table[..1]).unwrap()), ["bias", "weight"]);
}

#[test]
fn a_check_finds_everything_at_once() {
    #[derive(Module, Debug)]
    struct Model {
        first: Linear,
        second: Linear,
    }
    let model = |width| Model { first: linear(width), second: linear(2) };
    let saved = Saved::new(&model(2));
    assert!(saved.safetensors().check(&model(2)).is_complete());
    let file = saved.safetensors().with_key_remapping("^second", "third.second").unwrap();
    let check = file.check(&model(5));
    assert!(!check.is_complete());
    assert_eq!(check.matched.iter().map(|found| &found.path[..]).collect::<Vec<_>>(), ["first.bias"]);
    let missing: Vec<_> =
        check.missing.iter().map(|missing| (&missing.path[..], &missing.similar_names[0][..])).collect();
    assert_eq!(missing, [("second.weight", "third.second.weight"), ("second.bias", "third.second.bias")]);
    assert!(
        matches!(&check.misfits[..], [LazyError::Shape { parameter, .. }] if parameter == "first.weight")
    );
    assert_eq!(check.unused, ["third.second.bias", "third.second.weight"]);
    let shown = check.to_string();
    for line in [
        "1 of 4 parameters",
        "no tensor for second.weight [2, 3]; similar: third.second.weight",
        "no parameter for third",
    ] {
        assert!(shown.contains(line), "{line}: {shown}");
    }
    let error = model(2).lazy_load(&file, &all()).unwrap_err().to_string();
    assert!(
        error.contains("the parameter second.weight (it has third.second.weight")
            && error.contains("nor for second.bias"),
        "{error}"
    );
}

#[test]
fn matrices_of_pytorch_without_an_adapter() {
    let square = |width| LinearConfig::new(width, width).init(&Device::flex());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.pt");
    let storage = TensorData::new(vec![0.5f32; 9], [9]);
    write(&path, &[View::whole("weight", 0, &[3, 3]), View::whole("bias", 0, &[3])], &[storage]);
    let warnings = |file: &WeightFile| {
        let (checked, (_, report)) = (file.check(&square(3)).warnings, load(square(3), file, &all()));
        assert_eq!(checked, report.warnings);
        assert_eq!(report.to_string().contains("\nwarning: "), !checked.is_empty());
        checked
    };
    let [warning] = &warnings(&open(&path))[..] else { panic!("one warning") };
    assert!(warning.contains("the square weight weight"), "{warning}");
    assert!(warnings(&open(&path).with_pytorch_adapter()).is_empty());
    assert!(warnings(&Saved::new(&square(3)).safetensors()).is_empty(), "Burn wrote it");
    let other = LinearConfig::new(2, 3).init(&Device::flex());
    let saved = Saved::new(&LinearConfig::new(3, 2).with_bias(false).init(&Device::flex()));
    let error =
        other.lazy_load(&saved.safetensors(), &all().with_allow_partial(true)).unwrap_err().to_string();
    assert!(error.contains("transposed; see WeightFile::with_pytorch_adapter"), "{error}");
}

#[test]
fn tensors_that_are_not_read_refuse_only_what_uses_them() {
    #[derive(Module, Debug)]
    struct Only {
        weight: Param<Tensor<2>>,
    }
    let only = || Only { weight: Param::from_tensor(Tensor::zeros([2, 3], &Device::flex())) };
    let file = open(&data("kinds.pt"));
    let (lazy, report) = load(only(), &file, &all());
    assert_eq!(lazy.weight.val().into_data().try_into_vec::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(report.unused, ["complex", "eight", "quantized", "sparse", "strided"]);
    assert!(
        file.read("sparse").unwrap_err().to_string().contains("the checkpoint as a whole cannot be read")
    );
    for (name, kind) in [
        ("sparse", "_rebuild_sparse_tensor"),
        ("quantized", "_rebuild_qtensor"),
        ("complex", "kind"),
        ("eight", "kind"),
        ("strided", "row-major"),
    ] {
        let error = file.read(name).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(kind), "{error}");
        let renamed = file.clone().with_key_remappings(&[("^weight$", "other"), (name, "weight")]).unwrap();
        let error = only().lazy_load(&renamed, &all().with_allow_partial(true)).unwrap_err();
        assert!(matches!(&error, LazyError::Tensor { tensor, .. } if tensor == "weight"), "{error}");
    }
    let error = PrepareSource::try_from(&file).err().unwrap().to_string();
    assert!(error.contains("complex"), "all of it: {error}");
    PrepareSource::for_module(&file, &only()).unwrap();

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("eight.safetensors");
    let views = [
        ("scale", TensorView::new(Dtype::F8_E5M2, vec![4], &[0; 4]).unwrap()),
        ("weight", TensorView::new(Dtype::F32, vec![2, 3], &[0; 24]).unwrap()),
    ];
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    let (_, report) = load(only(), &open(&path), &all());
    assert_eq!(report.unused, ["scale"]);
    let error = open(&path).read("scale").unwrap_err().to_string();
    assert!(error.contains("of the dtype F8_E5M2, which Burn does not have"), "{error}");
}

#[test]
fn other_things_that_pytorch_writes() {
    let script = WeightFile::open(data("script.pt")).unwrap_err().to_string();
    assert!(script.contains("a TorchScript archive"), "{script}");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("list.pkl");
    std::fs::write(&path, b"\x80\x02]q\x00.").unwrap();
    let error = WeightFile::open(&path).unwrap_err().to_string();
    assert!(error.contains("list.pkl"), "{error}");
    std::fs::write(&path, b"\x80\x02}q\x00.").unwrap();
    let error = WeightFile::open(&path).unwrap_err().to_string();
    assert!(error.contains("list.pkl"), "{error}");
}

/// Layers of `data/layers.py`.
#[derive(Module, Debug)]
struct Layers {
    lstm: Vec<Lstm>,
    both: BiLstm,
    gru: Gru,
    rnn: Rnn,
    attention: MultiHeadAttention,
    conv: Conv1d,
    head: Linear,
}

impl Layers {
    fn new(device: &Device) -> Self {
        Self {
            lstm: (0..2).map(|_| LstmConfig::new(4, 4, true).init(device)).collect(),
            both: BiLstmConfig::new(4, 2, true).init(device),
            gru: GruConfig::new(4, 4, true).init(device),
            rnn: RnnConfig::new(4, 4, true).init(device),
            attention: MultiHeadAttentionConfig::new(4, 2).with_dropout(0.0).init(device),
            conv: Conv1dConfig::new(4, 4, 3).with_padding(PaddingConfig1d::Same).init(device),
            head: LinearConfig::new(4, 3).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.lstm.iter().fold(x, |x, lstm| lstm.forward(x, None).0);
        let x = self.both.forward(x, None).0;
        let x = self.gru.forward(x, None);
        let x = self.rnn.forward(x, None).0;
        let x = self.attention.forward(MhaInput::self_attn(x)).context;
        self.head.forward(self.conv.forward(x.swap_dims(1, 2)).swap_dims(1, 2))
    }
}

#[test]
fn layers_of_pytorch_are_split_and_renamed() {
    #[derive(Deserialize)]
    struct Expected {
        input: Vec<f32>,
        output: Vec<f32>,
    }
    let text = std::fs::read(data("layers.json")).unwrap();
    let Expected { input, output } = serde_json::from_slice(&text).unwrap();
    let file = open(&data("layers.pt")).with_key("model.module").unwrap();
    let file = file.with_pytorch_layers().unwrap().with_weight_norm().unwrap().with_pytorch_adapter();
    for device in devices() {
        for options in [all(), all().exclude("*")] {
            let (layers, report) = load(Layers::new(&device), &file, &options);
            assert_eq!(report.unused, [""; 0]);
            let x = Tensor::from_data(TensorData::new(input.clone(), [2, 3, 4]), &device);
            let expected = TensorData::new(output.clone(), [2, 3, 3]);
            layers.forward(x).into_data().assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-6));
        }
    }
    // What is prepared is what was made of it.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("prepared.bpk");
    let device = Device::flex();
    prepare(PrepareSource::for_module(&file, &Layers::new(&device)).unwrap(), &path, &PrepareOptions::new())
        .unwrap();
    let x = || Tensor::from_data(TensorData::new(input.clone(), [2, 3, 4]), &device);
    let [prepared, direct] =
        [open(&path), file].map(|file| load(Layers::new(&device), &file, &LazyOptions::new()).0);
    let tolerance = Tolerance::absolute(1e-6); // products with transposed views sum in another order
    prepared.forward(x()).into_data().assert_approx_eq::<f32>(&direct.forward(x()).into_data(), tolerance);

    let error = open(&data("model.pt")).with_pytorch_layers().unwrap_err().to_string();
    assert!(error.contains("it has no LSTM"), "{error}");
    // As `MultiheadAttention(1, 1, bias=False, add_bias_kv=True)` is written.
    let path = directory.path().join("attention.safetensors");
    write_floats(&path, &[("a.in_proj_weight", &[3, 1], &[0.0; 3]), ("a.bias_k", &[1, 1, 1], &[0.0])]);
    let error = open(&path).with_pytorch_layers().unwrap_err().to_string();
    assert!(
        error.contains("a.bias_k cannot be read: Burn's attention has no biases that are keys and values"),
        "{error}"
    );
}

#[test]
fn rows_are_split_joined_and_copied() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let numbers: Vec<f32> = (0..12).map(|x| x as f32).collect();
    write_floats(
        &path,
        &[("a.qkv", &[6, 2], &numbers), ("a.bias", &[6], &numbers[..6]), ("other", &[1], &[9.0])],
    );
    let file = || open(&path);

    let equal = file().with_equal_rows(r"^a\.(qkv|bias)$", &["q.$1", "k.$1", "v.$1"]).unwrap();
    assert_eq!(names(&equal), ["k.bias", "k.qkv", "other", "q.bias", "q.qkv", "v.bias", "v.qkv"]);
    assert_eq!(
        (values(&equal, "k.qkv"), values(&equal, "v.bias")),
        (vec![4.0, 5.0, 6.0, 7.0], vec![4.0, 5.0])
    );

    // Of heads that follow one another.
    let heads = [("q", 0..1), ("k", 1..2), ("q", 3..4), ("k", 4..5)];
    let rows = file().with_rows(r"^a\.qkv$", &heads).unwrap();
    assert_eq!(
        (values(&rows, "q"), values(&rows, "k")),
        (vec![0.0, 1.0, 6.0, 7.0], vec![2.0, 3.0, 8.0, 9.0])
    );
    let back = rows.clone().with_rows("^q$", &[("first", 0..1), ("none", 1..1)]).unwrap();
    assert_eq!((values(&back, "first"), values(&back, "none")), (vec![0.0, 1.0], vec![]), "of what was made");

    let joined = equal.with_joined_rows(r"^q\.(.*)$", &["v.$1", "k.$1"], "qvk.$1").unwrap();
    assert_eq!(names(&joined), ["other", "qvk.bias", "qvk.qkv"]);
    assert_eq!(values(&joined, "qvk.bias"), [0.0, 1.0, 4.0, 5.0, 2.0, 3.0]);

    let copied = file().with_copies("^other$", "copy").unwrap();
    assert_eq!((values(&copied, "copy"), values(&copied, "other")), (vec![9.0], vec![9.0]));
    assert_eq!(
        values(&copied.with_copies("^copy$", "a.bias").unwrap(), "a.bias").len(),
        6,
        "it is there already"
    );

    let error = |file: Result<WeightFile, LazyError>| file.unwrap_err().to_string();
    for (failed, reason) in [
        (file().with_equal_rows("^none$", &["x"]), "it matches none"),
        (file().with_equal_rows("^a.qkv$", &["x", "y", "z", "w"]), "6 rows cannot be divided into 4"),
        (file().with_equal_rows("^a.qkv$", &["other", "y"]), "a second other"),
        (file().with_rows("^a.qkv$", &[("x", 5..7)]), "it has 6 rows, and not 5..7"),
        (file().with_joined_rows("^a.qkv$", &["none"], "x"), "no tensor for the parameter none"),
        (file().with_joined_rows("^a.qkv$", &["a.bias"], "x"), "cannot be joined"),
        (file().with_copies("^none$", "x"), "it matches none"),
        (file().with_weight_norm(), "it matches none"),
    ] {
        let error = error(failed);
        assert!(error.contains(reason), "{reason}: {error}");
    }
}

/// Parts of rows are read where they lie, and so are rows of parts.
#[test]
fn parts_are_lazy() {
    #[derive(Module, Debug)]
    struct Split {
        query: Linear,
        key: Linear,
        table: Embedding,
    }
    let device = Device::flex();
    let layer = || LinearConfig::new(4, 3).with_bias(false).init(&device);
    let split = || Split { query: layer(), key: layer(), table: EmbeddingConfig::new(2, 4).init(&device) };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let numbers: Vec<f32> = (0..32).map(|x| x as f32).collect();
    write_floats(&path, &[("all.weight", &[8, 4], &numbers)]);
    let rows = [("query", 0..3), ("key", 3..6), ("table", 6..8)];
    let file = open(&path).with_rows("^all", &rows).unwrap().with_pytorch_adapter();
    let options = all().with_prefetch(0).with_budget(3 * 4 * 4);
    let (lazy, report) = load(split(), &file, &options);
    assert_eq!(report.lazy.len(), 3);
    let x = Tensor::<2>::from_floats([[1.0, 0.0, 0.0, 2.0]], &device);
    let expected = TensorData::from([[42.0f32, 54.0, 66.0]]); // of [12, 13, 14, 15] and the next rows
    lazy.key.forward(x).into_data().assert_eq(&expected, false);
    assert_eq!(report.cache.statistics().bytes_read, 3 * 4 * 4);
    let row = lazy.table.forward(Tensor::from_ints([[1]], &device));
    row.into_data().assert_eq(&TensorData::from([[[28.0f32, 29.0, 30.0, 31.0]]]), false);
    assert_eq!(report.cache.statistics().bytes_read, (3 + 1) * 4 * 4, "one row");
}

#[test]
fn rows_of_what_is_read_as_a_whole() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let numbers: Vec<f32> = (0..8).map(|x| x as f32).collect();
    write_floats(&path, &[("a", &[2, 2], &numbers[..4]), ("b", &[2, 2], &numbers[4..])]);
    let rows = [("q", 3..4), ("k", 1..3), ("q", 0..2), ("none", 2..2)];
    let file =
        open(&path).with_joined_rows("^a$", &["b"], "whole").unwrap().with_rows("^whole$", &rows).unwrap();
    assert_eq!(values(&file, "q"), [6.0, 7.0, 0.0, 1.0, 2.0, 3.0]);
    assert_eq!(values(&file, "k"), [2.0, 3.0, 4.0, 5.0]);
    assert_eq!(values(&file, "none"), [0.0; 0]);
}

/// Layers are called as in their module, wherever the file has their weights, as adapters of `peft` look them up.
#[test]
fn rows_in_another_order() {
    #[derive(Module, Debug)]
    struct Rotary {
        query: Linear,
    }
    #[derive(Module, Debug)]
    enum Attention {
        Rotary(Rotary),
    }
    #[derive(Module, Debug)]
    struct Layer {
        attention: Attention,
    }
    let layer = || {
        let query = LinearConfig::new(1, 8).with_bias(false).init(&Device::flex());
        Layer { attention: Attention::Rotary(Rotary { query }) }
    };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let numbers: Vec<f32> = (0..8).map(|x| x as f32).collect();
    write_floats(&path, &[("attention.query.weight", &[8, 1], &numbers)]);
    let file = |layers: &str, head: usize| {
        open(&path).with_adapter(RowOrders::new().with(layers, RowOrder::rotary_pairs(head)).unwrap())
    };
    for options in [all(), all().exclude("*")] {
        let (layer, _) = load(layer(), &file(r"^attention\.Rotary\.query$", 8), &options);
        let Attention::Rotary(Rotary { query }) = layer.attention;
        let loaded: Vec<f32> = query.weight.val().into_data().try_into_vec().unwrap();
        assert_eq!(loaded, [0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]);
    }
    for head in [0, 3, 6] {
        let file = file("query$", head);
        let error = layer().lazy_load(&file, &all()).unwrap_err().to_string();
        let reason = format!("8 outputs are no heads of {head} features in pairs");
        assert!(error.contains("attention.query.weight") && error.contains(&reason), "{error}");
        let check = file.check(&layer()).to_string();
        assert!(check.contains(&reason), "{check}");
    }
}

#[test]
fn weights_are_normalized() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let v = [3.0, 4.0, 0.0, 2.0];
    for (g, values_of_g, expected) in [
        (&[2, 1, 1][..], &[10.0, 3.0][..], [6.0, 8.0, 0.0, 3.0]),
        (&[1, 2, 1], &[3.0, 20.0], [3.0, 4.0 * 20.0 / 20.0f32.sqrt(), 0.0, 2.0 * 20.0 / 20.0f32.sqrt()]),
        (&[], &[29.0], [3.0, 4.0, 0.0, 2.0].map(|v: f32| v * 29.0f32.sqrt())),
    ] {
        write_floats(&path, &[("a.weight_g", g, values_of_g), ("a.weight_v", &[2, 2, 1], &v)]);
        let file = open(&path).with_weight_norm().unwrap();
        let found = file.read("a.weight").unwrap();
        found.assert_approx_eq::<f32>(&TensorData::new(expected.to_vec(), [2, 2, 1]), Tolerance::default());
    }
    write_floats(&path, &[("weight_g", &[3, 1, 1], &[1.0; 3]), ("weight_v", &[2, 2, 1], &v)]);
    let error = open(&path).with_weight_norm().unwrap_err().to_string();
    assert!(error.contains("[3, 1, 1] is not that of norms of [2, 2, 1]"), "{error}");
}

#[test]
fn destinations_that_are_refused() {
    let saved = Saved::new(&linear(2));
    let refused = |source: WeightFile, name: &str| {
        let error = prepare(source, saved.path(name), &PrepareOptions::new()).unwrap_err();
        assert!(matches!(error, LazyError::Prepare { .. }), "{error}");
        error.to_string()
    };
    assert!(refused(saved.safetensors(), "other.safetensors").contains("no .safetensors; call it .bpk"));
    std::fs::create_dir(saved.path("folder")).unwrap();
    assert!(refused(saved.safetensors(), "folder").contains("it is a directory"));
    write_floats(&saved.path("empty.safetensors"), &[]);
    assert!(refused(open(&saved.path("empty.safetensors")), "other.bpk").contains("it has no tensors"));
    assert!(!saved.path("other.bpk").exists());
}

/// What is done with names takes a time that grows with their length, not with its square.
#[test]
fn names_in_many_wrappers() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let name = "module.".repeat(1 << 20) + "_orig_mod.w";
    write_floats(&path, &[(&name, &[1], &[1.0])]);
    let begin = std::time::Instant::now();
    assert_eq!(open(&path).tensors().len(), 1);
    assert!(begin.elapsed().as_secs() < 60, "minutes, if each prefix were taken off by itself");
}

/// A dictionary that is nested very deeply has paths far longer than its pickle: 200 GB here, which would end this process.
#[test]
fn deep_dictionaries_take_no_more_memory_than_their_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("deep.pt");
    crate::archives::write_deep(&path, 20_000);
    let _ = WeightFile::open(&path).map(|file| file.tensors().len());
}

/// One of two tensors under the same name, of which only the first lies in order, is the wrong one.
#[test]
fn of_two_tensors_under_one_name_the_last_counts() {
    let numbers = |first: usize| TensorData::new((first..first + 4).map(|x| x as f32).collect(), [4]);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("twice.pt");
    let strided = View { strides: vec![1, 2], ..View::whole("w", 1, &[2, 2]) };
    write(&path, &[View::whole("w", 0, &[2, 2]), strided], &[numbers(0), numbers(4)]);
    match WeightFile::open(&path) {
        Ok(file) => assert_eq!(values(&file, "w"), [4.0, 6.0, 5.0, 7.0]),
        Err(error) => assert!(error.to_string().contains("twice.pt")),
    }
}
