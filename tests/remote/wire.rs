//! A connection to a server on which something happens after a number of bytes.
use super::server::Server;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;

/// Stands between a server and those that connect to it: the program, and other servers.
pub struct Wire {
    address: String,
    state: Arc<State>,
}

type Act = Box<dyn FnOnce() + Send>;

struct State {
    /// Bytes that were sent to the server.
    bytes: AtomicU64,
    /// What is done before the server gets more than so many of them.
    act: Mutex<Option<(u64, Act)>>,
}

impl Wire {
    pub fn to(server: Arc<Server>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("ws://{}", listener.local_addr().expect("its address"));
        let state = Arc::new(State { bytes: AtomicU64::new(0), act: Mutex::default() });
        let of_thread = state.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                // One that is gone refuses.
                let Some(server) = server.connection() else { continue };
                let sockets = [&client, &server].map(|socket| {
                    let _ = socket.set_nodelay(true);
                    socket.try_clone().expect("a socket")
                });
                let [back_to, back_from] = sockets;
                let state = of_thread.clone();
                thread::spawn(move || copy(client, server, |sent| state.pass(sent)));
                thread::spawn(move || copy(back_from, back_to, |_| ()));
            }
        });
        Self { address, state }
    }

    /// Of WebSocket.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn bytes(&self) -> u64 {
        self.state.bytes.load(SeqCst)
    }

    /// Does something when the server would get more than so many bytes from now on.
    pub fn act_after(&self, bytes: u64, act: impl FnOnce() + Send + 'static) {
        *self.state.act.lock().expect("no panic") = Some((self.bytes() + bytes, Box::new(act)));
    }
}

impl State {
    fn pass(&self, sent: usize) {
        let bytes = self.bytes.fetch_add(sent as u64, SeqCst) + sent as u64;
        let act = self.act.lock().expect("no panic").take_if(|(at, _)| bytes > *at);
        if let Some((_, act)) = act {
            act();
        }
    }
}

/// Sends on what comes, in small pieces, until one end is gone.
fn copy(mut from: TcpStream, mut to: TcpStream, pass: impl Fn(usize)) {
    let mut buffer = [0; 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        pass(count);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    for socket in [from, to] {
        let _ = socket.shutdown(Shutdown::Both); // it may be closed
    }
}
