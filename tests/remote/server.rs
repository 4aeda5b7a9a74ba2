//! Compute servers in processes of their own, which tests can kill and stop.
use burn::remote::RemoteHost;
use burn::server::{RemoteServer, WebSocketTransport};
use burn::tensor::Device;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{env, io, process, thread};

/// A server in a process of its own.
pub struct Server {
    process: Mutex<Child>,
    address: String,
    /// A test of a minute says so, and ends if nobody can read it.
    _output: BufReader<ChildStdout>,
}

impl Server {
    pub fn start() -> Self {
        let mut process = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", "server::a_server", "--ignored", "--nocapture"])
            .env("RUST_LOG", "off")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null()) // Burn's servers panic when one that sends to them is gone
            .spawn()
            .expect("this program runs");
        let mut output = BufReader::new(process.stdout.take().expect("piped"));
        let address = output.by_ref().lines().find_map(|line| {
            let line = line.expect("text");
            line.find("ws://").map(|at| line[at..].trim().to_string())
        });
        Self { process: Mutex::new(process), address: address.expect("an address"), _output: output }
    }

    /// A connection. `None` if its process has ended: then another process may have its port.
    pub fn connection(&self) -> Option<TcpStream> {
        let mut process = self.process();
        let runs = matches!(process.try_wait(), Ok(None));
        runs.then(|| TcpStream::connect(&self.address["ws://".len()..]).ok()).flatten()
    }

    /// A new session with a device. The first one computes, and the second one has frozen weights for others.
    pub fn device(&self, index: usize) -> Device {
        connect(&self.address, index)
    }

    /// Ends the process at once.
    pub fn kill(&self) {
        let mut process = self.process();
        process.kill().expect("a process that runs");
        process.wait().expect("its end");
    }

    /// Has the process stop where it is, with its connections open.
    #[cfg(unix)]
    pub fn stop(&self) {
        self.signal("-STOP");
    }

    /// Has a stopped process go on.
    #[cfg(unix)]
    pub fn go_on(&self) {
        self.signal("-CONT");
    }

    #[cfg(unix)]
    fn signal(&self, signal: &str) {
        let id = self.process().id().to_string();
        let sent = Command::new("kill").args([signal, &id]).status().expect("a system with `kill`");
        assert!(sent.success(), "kill {signal} {id}");
    }

    fn process(&self) -> MutexGuard<'_, Child> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A test may have killed it already.
        let mut process = self.process();
        let _ = process.kill();
        let _ = process.wait();
    }
}

/// A new session. (Burn goes on with one of the same address and credential, though the server may be another one by now.)
pub fn connect(address: &str, index: usize) -> Device {
    static SESSIONS: AtomicU64 = AtomicU64::new(0);
    let credential = format!("session {}", SESSIONS.fetch_add(1, Relaxed));
    let host = RemoteHost::websocket(address).with_credential(credential);
    Device::remote_options(&host).device_index(index).init().expect("a server that listens")
}

#[test]
#[ignore = "what `Server` runs"]
fn a_server() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    println!("ws://{}", listener.local_addr().expect("its address"));
    // Ends with the test that started it, also if that was killed.
    thread::spawn(|| {
        let _ = io::stdin().read_to_end(&mut vec![]);
        process::exit(0);
    });
    let devices = [Device::flex(), Device::flex()];
    RemoteServer::new(devices).serve(WebSocketTransport::from_listener(listener)).expect("serves");
}
