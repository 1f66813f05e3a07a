//! The account of a process, which `stratalloc info --pid` reads from a socket.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use super::*;

/// Sends these texts, one for each reader, as the account of this process.
fn send(texts: Vec<String>) -> std::thread::JoinHandle<()> {
    let name = format!("stratalloc-account-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).expect("a short name");
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
    let name = SocketAddr::from_abstract_name("stratalloc-account-1").expect("a short name");
    let Ok(listener) = UnixListener::bind_addr(&name) else {
        return println!("skipped: process 1 has a socket of this name");
    };
    let refused = ended(stratalloc().args(["info", "--pid", "1", "--device", "sim"]));
    drop(listener);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("another process has its socket"), "{}", refused.stderr);
}
