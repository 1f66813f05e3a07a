//! The account of a process, which `stratalloc info --pid` reads from a socket.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use super::*;

/// Returns the address of the socket of a process in this pid namespace.
fn address_of(process: u32) -> SocketAddr {
    let namespace = std::fs::metadata("/proc/self/ns/pid").expect("every process has one").ino();
    SocketAddr::from_abstract_name(format!("stratalloc-account-{namespace}-{process}"))
        .expect("a short name")
}

/// Sends these texts, one for each reader, as the account of this process.
fn send(texts: Vec<String>) -> std::thread::JoinHandle<()> {
    let address = address_of(std::process::id());
    let listener = UnixListener::bind_addr(&address).expect("no other test has the name");
    std::thread::spawn(move || {
        for text in texts {
            let (mut reader, _) = listener.accept().expect("a reader comes");
            // A reader may close its end before it has read everything.
            let _ = reader.write_all(text.as_bytes());
        }
    })
}

#[test]
fn a_process_is_asked_for_its_account() {
    let row =
        r#"{"owner":"cuBLAS\u001b[2J","kind":"kernels","bytes":2097152,"found_by":"driver calls"}"#;
    let account =
        format!(r#"{{"device":3,"used_bytes":8388608,"total_bytes":83886080,"rows":[{row}]}}"#);
    let good = format!(r#"{{"accounts":[{account}]}}"#);
    let bad = ["", "{}", r#"{"error":"no room"}"#].map(str::to_owned);
    let long = format!("{good}{}", " ".repeat(2 << 20));
    let sender = send([vec![good.clone(), good.clone()], bad.into(), vec![long, good]].concat());
    let process = std::process::id().to_string();
    let asked = |device: &str, more: &[&str]| {
        ended(stratalloc().args(["info", "--pid", &process, "--device", device]).args(more))
    };
    let shown = asked("cuda:3", &[]);
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);
    assert!(shown.stdout.starts_with("cuda:3: 8.0 of 80.0 MiB used"), "{}", shown.stdout);
    assert!(shown.stdout.contains("cuBLAS") && shown.stdout.contains("25.0"), "{}", shown.stdout);
    assert!(!shown.stdout.contains('\u{1b}'), "{}", shown.stdout);
    let json = asked("cuda:3", &["--json"]).json();
    assert_eq!(json["rows"][0]["bytes"], 2 << 20);
    // The list of processes is used, and `sim` has no CUDA device.
    for reason in ["it sent no account", "it sent no account", "no room", "sends too much"] {
        let refused = asked("sim", &[]);
        assert_eq!(refused.code, Some(2), "{}", refused.stderr);
        let texts = [reason, "uses no CUDA device"];
        assert!(texts.iter().all(|text| refused.stderr.contains(text)), "{}", refused.stderr);
    }
    let other = asked("cuda:1", &[]);
    assert_eq!((other.code, other.stdout.as_str()), (Some(2), ""), "{}", other.stderr);
    sender.join().expect("all readers came");
}

#[test]
fn another_process_cannot_answer() {
    // The test's socket has the name of process 1.
    let Ok(listener) = UnixListener::bind_addr(&address_of(1)) else {
        return println!("skipped: process 1 has a socket of this name");
    };
    let refused = ended(stratalloc().args(["info", "--pid", "1", "--device", "sim"]));
    drop(listener);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("another process has its socket"), "{}", refused.stderr);
}

#[test]
fn a_process_that_accepts_no_connection_is_given_up() {
    // Another process has taken the name, and its queue is full.
    let mut child = Command::new("sleep").arg("100").spawn().expect("every system has it");
    let address = address_of(child.id());
    let listener = UnixListener::bind_addr(&address).expect("no other test has the name");
    rustix::net::listen(&listener, 0).expect("a shorter queue");
    let waiting = std::os::unix::net::UnixStream::connect_addr(&address).expect("one fits");
    let process = child.id().to_string();
    let refused = ended(stratalloc().args(["info", "--pid", &process, "--device", "sim"]));
    drop(waiting);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("accepts no connection within 5 s"), "{}", refused.stderr);
    child.kill().expect("it sleeps");
    child.wait().expect("it was killed");
    let missing = ended(stratalloc().args(["info", "--pid", &process, "--device", "sim"]));
    assert!(missing.stderr.contains("there is no such process"), "{}", missing.stderr);
}
