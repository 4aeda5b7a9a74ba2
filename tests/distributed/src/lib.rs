//! A compute server whose devices reduce gradients as those of CUDA do. Each computes on Flex.
//!
//! Burn reduces gradients on CUDA devices, and on remote devices whose server can. A channel of its own answers the reduction itself, and
//! gives every other operation to Flex: so Burn's distributed training runs on a machine without a GPU. What it does with the
//! gradients of our layers is Burn's own code, up to the sum.
#![cfg(feature = "server")]
use burn::backend::{
    DTypeUsageSet, DeviceId, DeviceOps, DeviceSettings, ExecutionError, Flex, FlexDevice,
    distributed::ReduceOperation, ops::FloatTensorOps, tensor::FloatTensor,
};
use burn::remote::RemoteHost;
use burn::server::WebSocketTransport;
use burn::tensor::{DType, Device, Shape, TensorData};
use burn_remote::ir::{
    AllReduceOpIr, DeviceIdIr, DistributedOperationIr, GraphBindings, GraphId, HandleKind, OperationIr,
    TensorId, TensorIr,
};
use burn_remote::server::BackendServer;
use burn_router::{
    BackendRouter, MultiBackendBridge, RouterChannel, RouterClient, RouterTensor, TensorInterpreter,
};
use std::collections::HashMap;
use std::net::TcpListener;
use std::pin::Pin;
use std::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Devices of a new server on this machine, which lives as long as the process.
pub fn devices(count: u16) -> Vec<Device> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = NEXT.fetch_add(count, Ordering::Relaxed);
    let lanes: Vec<Lane> = (first..first + count).map(Lane).collect();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("ws://{}", listener.local_addr().expect("its address"));
    let server = BackendServer::<BackendRouter<Reducing>>::new(lanes);
    thread::spawn(move || server.serve(WebSocketTransport::from_listener(listener)));
    let devices = RemoteHost::websocket(&address).devices().expect("a server that listens");
    devices.into_iter().collect()
}

/// How many tensors all servers reduced, each on every device.
pub fn reductions() -> usize {
    REDUCTIONS.load(Ordering::Relaxed)
}

static REDUCTIONS: AtomicUsize = AtomicUsize::new(0);

/// A device of a server. Each has its own tensors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lane(u16);

impl burn::backend::Device for Lane {
    fn from_id(id: DeviceId) -> Self {
        Self(id.index_id)
    }
    fn to_id(&self) -> DeviceId {
        DeviceId::new(0, self.0)
    }
}

impl DeviceOps for Lane {
    fn defaults(&self) -> DeviceSettings {
        FlexDevice.defaults()
    }
}

/// The way to the devices, which are in this process.
#[derive(Clone)]
pub struct Reducing;

impl RouterChannel for Reducing {
    type Device = Lane;
    type Bridge = Self;
    type Client = Client;

    fn name(lane: &Lane) -> String {
        format!("reducing {}", lane.0)
    }

    fn init_client(lane: &Lane) -> Client {
        let interpreter = Arc::new(Mutex::new(TensorInterpreter::new(FlexDevice)));
        Client { lane: lane.clone(), interpreter, reductions: Arc::default() }
    }

    fn get_tensor_handle(tensor: &TensorIr, client: &Client) -> HandleKind<Flex> {
        client.interpreter().get_tensor_handle(tensor)
    }

    fn register_tensor(
        client: &Client,
        handle: HandleKind<Flex>,
        shape: Shape,
        dtype: DType,
    ) -> RouterTensor<Client> {
        let id = client.create_empty_handle();
        client.interpreter().register_tensor_to_device(id, handle);
        RouterTensor::new(id, shape, dtype, client.clone())
    }
}

/// All devices have the same memory.
impl MultiBackendBridge for Reducing {
    type TensorHandle = HandleKind<Flex>;
    type Device = Lane;

    fn change_backend_float(tensor: HandleKind<Flex>, _: Shape, _: &Lane) -> HandleKind<Flex> {
        tensor
    }
    fn change_backend_int(tensor: HandleKind<Flex>, _: Shape, _: &Lane) -> HandleKind<Flex> {
        tensor
    }
    fn change_backend_bool(tensor: HandleKind<Flex>, _: Shape, _: &Lane) -> HandleKind<Flex> {
        tensor
    }
}

/// What computes for a device.
#[derive(Clone)]
pub struct Client {
    lane: Lane,
    interpreter: Arc<Mutex<TensorInterpreter<Flex>>>,
    /// In how many reductions the device took part.
    reductions: Arc<AtomicU64>,
}

impl Client {
    fn interpreter(&self) -> MutexGuard<'_, TensorInterpreter<Flex>> {
        self.interpreter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the other devices of the group, which reduce in the same order.
    fn all_reduce(&self, AllReduceOpIr { tensor, out, op, device_ids }: AllReduceOpIr) {
        let HandleKind::Float(part) = self.interpreter().get_tensor(&tensor) else {
            panic!("gradients are float tensors")
        };
        let number = self.reductions.fetch_add(1, Ordering::Relaxed);
        let reduced = Round::join((device_ids, number), self.lane.0, part, op);
        self.interpreter().register_tensor_to_device(out.id, HandleKind::Float(reduced));
    }
}

impl RouterClient for Client {
    type Device = Lane;

    fn register_op(&self, op: OperationIr) {
        match op {
            OperationIr::Distributed(DistributedOperationIr::AllReduce(reduction)) => {
                self.all_reduce(reduction)
            }
            OperationIr::Distributed(DistributedOperationIr::SyncCollective) => {} // a reduction is complete when it returns
            op => self.interpreter().register_op(op),
        }
    }
    fn read_tensor_async(
        &self,
        tensor: TensorIr,
    ) -> Pin<Box<dyn Future<Output = Result<TensorData, ExecutionError>> + Send>> {
        self.interpreter().read_tensor_async(tensor)
    }
    fn sync(&self) -> Result<(), ExecutionError> {
        self.interpreter().sync()
    }
    fn flush(&self) {}
    fn create_empty_handle(&self) -> TensorId {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        TensorId::new(NEXT.fetch_add(1, Ordering::Relaxed))
    }
    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        let (id, shape, dtype) = (self.create_empty_handle(), data.shape().clone(), data.dtype());
        self.interpreter().register_tensor_data_id(id, data);
        RouterTensor::new(id, shape, dtype, self.clone())
    }
    fn device(&self) -> Lane {
        self.lane.clone()
    }
    fn seed(&self, seed: u64) {
        self.interpreter().seed(seed);
    }
    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        self.interpreter().dtype_usage(dtype)
    }
    fn register_and_execute_graph(&self, _: GraphId, _: Vec<OperationIr>, _: GraphBindings) {
        unreachable!("nothing is fused");
    }
    fn execute_graph(&self, _: GraphId, _: GraphBindings) {
        unreachable!("nothing is fused");
    }
    fn register_alias(&self, new: TensorId, of: TensorId) {
        self.interpreter().register_alias(new, of);
    }
}

/// The devices that reduce, and how many reductions they had before.
type Key = (Vec<DeviceIdIr>, u64);

/// A reduction that some devices wait for.
#[derive(Default)]
struct Round {
    parts: Vec<(u16, FloatTensor<Flex>)>,
    reduced: Option<FloatTensor<Flex>>,
    /// How many devices have it.
    taken: usize,
}

static ROUNDS: LazyLock<Mutex<HashMap<Key, Round>>> = LazyLock::new(Mutex::default);
static CHANGED: Condvar = Condvar::new();

impl Round {
    fn join(key: Key, lane: u16, part: FloatTensor<Flex>, op: ReduceOperation) -> FloatTensor<Flex> {
        let count = key.0.len();
        let mut rounds = ROUNDS.lock().unwrap_or_else(PoisonError::into_inner);
        let round = rounds.entry(key.clone()).or_default();
        round.parts.push((lane, part));
        if round.parts.len() == count {
            round.parts.sort_by_key(|(lane, _)| *lane); // the same sum in every run
            let parts = round.parts.drain(..).map(|(_, part)| part);
            let sum = parts.reduce(Flex::float_add).expect("a part of this device");
            round.reduced = Some(match op {
                ReduceOperation::Sum => sum,
                ReduceOperation::Mean => Flex::float_div_scalar(sum, (count as f64).into()),
            });
            REDUCTIONS.fetch_add(1, Ordering::Relaxed);
            CHANGED.notify_all();
        }
        loop {
            let round = rounds.get_mut(&key).expect("until every device has it");
            if let Some(reduced) = round.reduced.clone() {
                round.taken += 1;
                if round.taken == count {
                    rounds.remove(&key);
                }
                return reduced;
            }
            rounds = CHANGED.wait(rounds).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
