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
    let endless = format!("[{}", "1,".repeat(1 << 20));
    let sender = send([vec![good.clone(), good], bad.into(), vec![endless]].concat());
    let process = std::process::id().to_string();
    let asked = |more: &[&str]| {
        ended(stratalloc().args(["info", "--pid", &process, "--device", "sim"]).args(more))
    };
    let shown = asked(&[]);
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);
    assert!(shown.stdout.starts_with("cuda:3: 8.0 of 80.0 MiB used"), "{}", shown.stdout);
    assert!(shown.stdout.contains("cuBLAS") && shown.stdout.contains("25.0"), "{}", shown.stdout);
    assert!(!shown.stdout.contains('\u{1b}'), "{}", shown.stdout);
    let json = asked(&["--json"]).json();
    assert_eq!(json["rows"][0]["bytes"], 2 << 20);
    // The list of processes is used, and `sim` has no CUDA device.
    for reason in ["it sent no account", "it sent no account", "no room", "it sent no account"] {
        let refused = asked(&[]);
        assert_eq!(refused.code, Some(1), "{}", refused.stderr);
        let texts = [reason, "uses no CUDA device"];
        assert!(texts.iter().all(|text| refused.stderr.contains(text)), "{}", refused.stderr);
    }
    sender.join().expect("all readers came");
}
