//! Two real processes with real memory. The other process runs this same program.
//!
//! An environment variable selects the role of the other process. It reads commands from its standard input,
//! and ends when that is closed, so that no process remains.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout};

use super::tools::{SHARED, allocate, engine, forged, shared};
use crate::common::prelude::*;

const PART: &str = "STRATALLOC_SHARING_PART";
const STREAM: StreamId = StreamId::DEFAULT;
const BLOCK_BYTES: u64 = 25 * MIB;

fn host() -> Arc<Host> {
    Arc::new(Host::with_bytes(256 * MIB))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("texts take all");
        text
    })
}

fn from_hex(text: &str) -> Vec<u8> {
    let pairs = text.as_bytes().chunks(2).map(|pair| str::from_utf8(pair).expect("digits"));
    pairs.map(|pair| u8::from_str_radix(pair, 16).expect("digits")).collect()
}

/// A process that shares memory. It is killed on drop.
struct Other {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start() -> Self {
        let program = std::env::current_exe().expect("tests are programs");
        Self::start_by(Command::new(program))
    }

    /// Starts a process in another pid namespace, in which it is process 1. Returns `None` if the system
    /// does not allow that.
    fn start_in_another_namespace() -> Option<Self> {
        let command = || {
            let mut command = Command::new("unshare");
            command.args(["--pid", "--fork", "--kill-child"]);
            command
        };
        if !command().arg("true").status().is_ok_and(|status| status.success()) {
            eprintln!("skipped: this user cannot make a pid namespace");
            return None;
        }
        let mut command = command();
        command.arg(std::env::current_exe().expect("tests are programs"));
        Some(Self::start_by(command))
    }

    fn start_by(mut command: Command) -> Self {
        let mut child = command
            .args([
                "--exact",
                "sharing::processes::the_other_process",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(PART, "exporter")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program can be started again");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        Self { child, input, output }
    }

    /// Returns the text behind the `@` in the next line with one that the other process writes.
    fn receive(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let len = self.output.read_line(&mut line).expect("it writes text");
            assert!(len > 0, "the other process ended too early");
            if let Some((_, answer)) = line.trim_end().split_once('@') {
                return answer.to_owned();
            }
        }
    }

    fn send(&mut self, word: &str) {
        let input = self.input.as_mut().expect("its input is open");
        writeln!(input, "{word}").expect("it listens");
    }

    fn handle(&mut self) -> SharedHandle {
        SharedHandle::from_bytes(&from_hex(&self.receive())).expect("it sent a handle")
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The code of the other process. Without the environment variable, this test does nothing.
#[test]
fn the_other_process() {
    if std::env::var(PART).is_err() {
        return;
    }
    let host = host();
    let engine = engine(host.clone(), SHARED);
    let mut block = Some(allocate(&engine, BLOCK_BYTES));
    let at = block.as_ref().unwrap().address();
    host.fill(at, 0x5A, BLOCK_BYTES, STREAM).unwrap();
    host.synchronize_stream(STREAM).unwrap();
    let handle = engine.share(block.as_ref().unwrap()).unwrap();
    println!("@{}", hex(handle.as_bytes()));
    for word in std::io::stdin().lines() {
        match word.unwrap().as_str() {
            "look" => {
                let mut bytes = [0; 2];
                host.copy_to_host(&mut bytes[..1], at, STREAM).unwrap();
                host.copy_to_host(&mut bytes[1..], at + BLOCK_BYTES - 1, STREAM).unwrap();
                println!("@{}", hex(&bytes));
            }
            "release" => {
                engine.free(block.take().unwrap()).unwrap();
                engine.empty_cache().unwrap();
                println!("@released");
            }
            _ => break,
        }
    }
}

fn bytes_at(host: &Host, address: u64) -> u8 {
    let mut byte = [0];
    host.copy_to_host(&mut byte, address, STREAM).expect("the block is mapped");
    byte[0]
}

#[test]
fn a_process_of_another_pid_namespace_shares_its_blocks() {
    let Some(mut other) = Other::start_in_another_namespace() else { return };
    let handle = other.handle();
    let host = host();
    let engine = engine(host.clone(), SHARED);
    // Each has no id in the other's namespace, or another one.
    assert_eq!(handle.process(), 1);
    let imported = engine.open(&handle).unwrap();
    assert_eq!(bytes_at(&host, imported.address()), 0x5A);
}

#[test]
fn both_processes_see_the_same_bytes() {
    let mut other = Other::start();
    let handle = other.handle();
    let host = host();
    let engine = engine(host.clone(), SHARED);
    assert_eq!(handle.process(), other.child.id());
    let imported = engine.open(&handle).unwrap();
    let (first, last) = (imported.address(), imported.address() + BLOCK_BYTES - 1);
    assert_eq!([bytes_at(&host, first), bytes_at(&host, last)], [0x5A; 2]);
    host.copy_from_host(first, &[1], STREAM).unwrap();
    host.copy_from_host(last, &[2], STREAM).unwrap();
    other.send("look");
    assert_eq!(other.receive(), "0102");

    // The other process unmaps its pages. The imported ones must stay mapped.
    other.send("release");
    assert_eq!(other.receive(), "released");
    assert_eq!([bytes_at(&host, first), bytes_at(&host, last)], [1, 2]);
    drop(imported);
    assert_eq!(engine.open(&handle).unwrap_err(), SharingError::PageGone { page: 0 });
    let used = host.memory_info().unwrap();
    assert_eq!(used.free_bytes, used.total_bytes);
}

#[test]
fn a_process_that_has_died_is_gone_and_what_was_opened_stays() {
    let mut other = Other::start();
    let handle = other.handle();
    let host = host();
    let engine = engine(host.clone(), SHARED);
    let imported = engine.open(&handle).unwrap();
    let process = handle.process();
    other.child.kill().unwrap();
    other.child.wait().unwrap();
    assert_eq!(bytes_at(&host, imported.address()), 0x5A);
    drop(imported);
    assert_eq!(engine.open(&handle).unwrap_err(), SharingError::ExporterGone { process });
}

#[test]
fn forged_handles_and_handles_of_the_future_open_nothing() {
    let mut other = Other::start();
    let handle = other.handle();
    let (process, host) = (handle.process(), host());
    let engine = engine(host, SHARED);
    let forge = |at, with: &[u8]| SharedHandle::from_bytes(&forged(handle.as_bytes(), at, with));
    let secret = engine.open(&forge(40, &[0; 16]).unwrap()).unwrap_err();
    assert_eq!(secret, SharingError::Refused { process });
    let future = forge(8, &[2, 0]).unwrap_err();
    assert!(future.to_string().contains("version 2"), "{future}");
    // The start time in the handle is wrong. But a process that answers at the socket and accepts the secret
    // is the right one.
    assert!(engine.open(&forge(16, &[1; 8]).unwrap()).is_ok());
    // No process answers at that socket, as if the process id had been reused.
    let mut reused = forged(handle.as_bytes(), 16, &[1; 8]);
    reused = forged(&reused, 56, &[3; 16]);
    let reused = engine.open(&SharedHandle::from_bytes(&reused).unwrap()).unwrap_err();
    assert_eq!(reused, SharingError::ExporterGone { process });
    drop(engine.open(&handle).unwrap());
}

#[test]
fn pages_come_over_the_socket_or_not_at_all() {
    let mut other = Other::start();
    let handle = other.handle();
    let engine = engine(host(), SHARED);
    for absent in [
        forged(handle.as_bytes(), 56, &[3; 16]),
        forged(&forged(handle.as_bytes(), 56, &[3; 16]), 40, &[0; 16]),
    ] {
        let error = engine.open(&SharedHandle::from_bytes(&absent).unwrap()).unwrap_err();
        assert_eq!(error, SharingError::Unreachable { process: handle.process() });
    }
    drop(engine.open(&handle).unwrap());
}

#[test]
fn silent_and_flooding_clients_stop_no_other() {
    use rustix::net::{
        AddressFamily, SendFlags, SocketAddrUnix, SocketType, connect, send, socket,
    };
    let mut other = Other::start();
    let handle = other.handle();
    let bytes = handle.as_bytes();
    let name: Vec<u8> = b"stratalloc/".iter().chain(&bytes[56..72]).copied().collect();
    let name = SocketAddrUnix::new_abstract_name(&name).unwrap();
    let open = || {
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&socket, &name).unwrap();
        socket
    };
    // 20 silent clients are more than are served at once, so the import waits for their timeout of two
    // seconds. Other clients send nothing, a byte, too many bytes, or the right secret before invalid bytes.
    let silent: Vec<_> = (0..20).map(|_| open()).collect();
    let mut secret_then_noise = b"stratrq1".to_vec();
    secret_then_noise.extend(&bytes[40..56]);
    secret_then_noise.extend([0xFF; 8]);
    for noise in [vec![], vec![0; 1], vec![0xFF; 100_000], secret_then_noise] {
        let socket = open();
        let _ = send(&socket, &noise, SendFlags::NOSIGNAL);
    }
    let host = host();
    let engine = engine(host.clone(), SHARED);
    let imported = engine.open(&handle).unwrap();
    assert_eq!(bytes_at(&host, imported.address()), 0x5A);
    drop(silent);
}

#[test]
fn answers_that_make_no_sense_open_nothing() {
    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, accept, bind, listen,
        recv, send, socket,
    };
    let ours = engine(host(), SHARED);
    let theirs_host = host();
    let theirs = engine(theirs_host.clone(), SHARED);
    let (_block, handle) = shared(&ours, BLOCK_BYTES);
    let liar = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let mut random = [0xA5; 16];
    random[..4].copy_from_slice(&std::process::id().to_le_bytes());
    let name: Vec<u8> = b"stratalloc/".iter().chain(&random).copied().collect();
    bind(&liar, &SocketAddrUnix::new_abstract_name(&name).unwrap()).unwrap();
    listen(&liar, 4).unwrap();
    let random_handle = SharedHandle::from_bytes(&forged(handle.as_bytes(), 56, &random)).unwrap();
    // Wrong answers: none, a short one, a long one, an unknown one, pages without descriptors, and a page
    // that was not requested.
    let answers: [&[u8]; 6] =
        [&[], &[0; 7], &[0; 100], &[9; 8], &[0, 0, 0, 0, 2, 0, 0, 0], &[2, 0, 0, 0, 2, 0, 0, 0]];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for answer in answers {
                let client = accept(&liar).expect("a client connects");
                let mut bytes = [0; 4096];
                recv(&client, &mut bytes[..], RecvFlags::empty()).expect("it sends a request");
                if !answer.is_empty() {
                    send(&client, answer, SendFlags::NOSIGNAL).expect("it listens");
                }
            }
        });
        for answer in answers {
            let error = theirs.open(&random_handle).expect_err("that is no answer");
            assert!(matches!(error, SharingError::BadAnswer { .. }), "{answer:?}: {error}");
        }
    });
    let info = theirs_host.memory_info().unwrap();
    assert_eq!(info.free_bytes, info.total_bytes);
    drop(theirs.open(&handle).unwrap());
}
