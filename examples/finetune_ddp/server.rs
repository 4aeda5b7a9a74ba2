//! A compute server on this machine, in a process of its own. `benches/servers.rs` uses this file, too.
use burn::server::{RemoteServer, WebSocketTransport};
use burn::tensor::Device;
use std::error::Error;
use std::io::{self, BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::{env, fs};

/// Serves this machine's device; the first line of its output is its address on this machine.
pub fn serve(port: u16) -> Result<(), Box<dyn Error>> {
    // A port that the user did not choose can be reached only from this machine.
    let interface = if port == 0 { "127.0.0.1" } else { "0.0.0.0" };
    let listener = TcpListener::bind((interface, port))?;
    println!("ws://127.0.0.1:{}", listener.local_addr()?.port());
    ignore_closed_connections();
    let device = Device::default(); // the environment variable `BURN_DEVICE` can choose another one
    // The second one gives other servers its frozen weights while the first one computes.
    let devices = [device.clone(), device];
    Ok(RemoteServer::new(devices).serve(WebSocketTransport::from_listener(listener))?)
}

/// Burn's server panics in the thread of a connection whose other end has gone, as it does when the run is over. Other panics are reported.
fn ignore_closed_connections() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let message = panic.payload_as_str().unwrap_or_default();
        if !message.contains("ResetWithoutClosingHandshake") {
            report(panic);
        }
    }));
}

/// A server whose process ends when this is dropped.
pub struct LocalServer {
    process: Child,
    address: String,
}

impl LocalServer {
    /// Starts this program as a server, and waits until it listens. Its address space has at most so many MiB.
    pub fn start(limit: Option<u64>) -> io::Result<Self> {
        let program = env::current_exe()?;
        let mut command = match limit {
            None => Command::new(program),
            Some(mib) => {
                let mut shell = Command::new("sh");
                shell
                    .args(["-c", &format!("ulimit -v {} && exec \"$0\" \"$@\"", mib.saturating_mul(1 << 10))])
                    .arg(program);
                // Freed memory returns to the system, and threads share what is reserved.
                shell.env("MALLOC_ARENA_MAX", "1").env("MALLOC_MMAP_THRESHOLD_", "65536");
                shell
            }
        };
        let mut process = command
            .args(["--serve", "0"])
            .env("RUST_LOG", "off") // its peers end before it does
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = process.stdout.take().ok_or_else(|| io::Error::other("a server without output"))?;
        let mut server = Self { process, address: String::new() };
        BufReader::new(stdout).read_line(&mut server.address)?;
        server.address.truncate(server.address.trim_end().len());
        match server.address.starts_with("ws://") {
            true => Ok(server),
            false => Err(io::Error::other(format!("a compute server did not start: {:?}", server.address))),
        }
    }

    /// The most memory that its process had so far, in bytes. `None` where the system does not say.
    pub fn peak(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
    }

    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
