//! Replicas that run: real sockets, a store in a folder or in a real etcd.

use mission_core::service::{FromService, PROTOCOL, ToService};
use mission_service::service::{Service, UPGRADE};
use mission_service::settings::{Settings, Tokens};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

fn settings(store: &str) -> Settings {
    Settings {
        name: "test".into(),
        listen: "127.0.0.1:0".parse().unwrap(),
        address: "http://127.0.0.1:1".into(),
        store: store.into(),
        policy: "priority".into(),
        tokens: Tokens { operator: "operator".into(), viewer: "viewer".into(), cluster: "cluster".into() },
        certificate: None,
        store_ca: None,
        store_certificate: None,
    }
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("mission-service-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        Folder(folder)
    }

    fn text(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn connect(service: &Service) -> TcpStream {
    let stream = TcpStream::connect(service.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    stream
}

/// Status and body of an answer.
fn ask(service: &Service, token: &str, head: &str, body: &str) -> (u16, String) {
    let mut stream = connect(service);
    let length = body.len();
    write!(stream, "{head} HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: {length}\r\n\r\n{body}")
        .unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).unwrap().parse().unwrap();
    let mut length = 0;
    while line.trim() != "" {
        line.clear();
        reader.read_line(&mut line).unwrap();
        if let Some(value) = line.strip_prefix("Content-Length: ") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    (status, String::from_utf8(body).unwrap())
}

fn join(service: &Service, cluster: &str, incarnation: u64) -> BufReader<TcpStream> {
    let mut stream = connect(service);
    write!(stream, "GET /v1/session HTTP/1.1\r\nUpgrade: {UPGRADE}\r\nAuthorization: Bearer cluster\r\n\r\n").unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    while !line.ends_with("\r\n\r\n") {
        reader.read_line(&mut line).unwrap();
    }
    assert!(line.starts_with("HTTP/1.1 101"), "{line}");
    say(&mut reader, &hello(cluster, incarnation));
    reader
}

fn hello(cluster: &str, incarnation: u64) -> ToService {
    ToService::Hello {
        protocol: PROTOCOL,
        cluster: cluster.into(),
        incarnation,
        jobs: vec![],
        hosts: ["host".into()].into(),
        transfers: vec![],
        carried: vec![],
        flows_per_host: None,
    }
}

fn say(session: &mut BufReader<TcpStream>, message: &ToService) {
    let line = serde_json::to_string(message).unwrap();
    session.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
}

fn hear(session: &mut BufReader<TcpStream>) -> FromService {
    let mut line = String::new();
    session.read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
}

fn wait_for_leader(service: &Service) {
    let end = Instant::now() + Duration::from_secs(10);
    while service.status().unwrap().epoch.is_none() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_cluster_joins_hears_what_an_operator_changes_and_finds_it_after_a_start_anew() {
    let folder = Folder::new("join");
    let service = Service::start(settings(folder.text())).unwrap();
    wait_for_leader(&service);
    let mut session = join(&service, "c", 1);
    let FromService::Welcome { service: own, epoch, state, .. } = hear(&mut session) else { panic!() };
    assert_eq!(state.policy, "priority");
    let (status, body) = ask(&service, "operator", "POST /v1/ask", r#"{"ask":"policy","policy":"fair"}"#);
    assert_eq!((status, body.as_str()), (200, "{\"ok\":true}"));
    let FromService::Update { version: 2, update, .. } = hear(&mut session) else { panic!() };
    assert_eq!(update.policy.as_deref(), Some("fair"));
    let (status, body) = ask(&service, "operator", "POST /v1/ask", r#"{"ask":"policy","policy":"nonsense"}"#);
    assert!(status == 409 && body.contains("there is no policy"), "{body}");
    service.stop();
    drop(service);
    let service = Service::start(settings(folder.text())).unwrap();
    wait_for_leader(&service);
    let mut session = join(&service, "c", 1);
    let FromService::Welcome { service: again, epoch: later, state, .. } = hear(&mut session) else { panic!() };
    assert_eq!((again, state.policy.as_str()), (own, "fair"));
    assert!(later > epoch);
}

#[test]
fn who_shows_no_token_or_another_learns_and_changes_nothing() {
    let folder = Folder::new("tokens");
    let service = Service::start(settings(folder.text())).unwrap();
    wait_for_leader(&service);
    let change = r#"{"ask":"policy","policy":"fair"}"#;
    for (token, head, expected) in [
        ("", "GET /v1/status", 401),
        ("wrong", "GET /v1/status", 401),
        ("viewer", "GET /v1/status", 200),
        ("cluster", "GET /v1/status", 403),
        ("viewer", "POST /v1/ask", 403),
        ("cluster", "POST /v1/ask", 403),
        ("operator", "GET /v1/session", 403),
        ("operator", "GET /nothing", 404),
        ("operator", "DELETE /v1/status", 405),
        ("", "GET /healthz", 200),
    ] {
        let (status, body) = ask(&service, token, head, if head.starts_with("POST") { change } else { "" });
        assert_eq!(status, expected, "{token} {head}: {body}");
    }
    assert_eq!(service.status().unwrap().policy, "priority");
}

/// X7: one session brought 196 clusters with 19,600 jobs into the store.
#[test]
fn a_session_is_of_one_cluster() {
    let folder = Folder::new("names");
    let service = Service::start(settings(folder.text())).unwrap();
    wait_for_leader(&service);
    let mut session = join(&service, "one", 1);
    assert!(matches!(hear(&mut session), FromService::Welcome { .. }));
    // It may say all of it again.
    say(&mut session, &hello("one", 1));
    assert!(matches!(hear(&mut session), FromService::Welcome { .. }));
    say(&mut session, &hello("two", 1));
    let FromService::Rejected { why } = hear(&mut session) else { panic!() };
    assert!(why.contains("this session is of cluster one"), "{why}");
    let names: Vec<String> = service.status().unwrap().clusters.iter().map(|own| own.cluster.to_string()).collect();
    assert!(!names.contains(&"two".to_owned()), "{names:?}");
}

#[test]
fn nonsense_ends_a_connection_and_nothing_else() {
    let folder = Folder::new("nonsense");
    let service = Service::start(settings(folder.text())).unwrap();
    wait_for_leader(&service);
    let mut good = join(&service, "good", 1);
    assert!(matches!(hear(&mut good), FromService::Welcome { .. }));
    for text in ["\x16\x03\x01\r\n\r\n", "GET / HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n"] {
        let mut stream = connect(&service);
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    let mut bad = join(&service, "bad", 1);
    assert!(matches!(hear(&mut bad), FromService::Welcome { .. }));
    bad.get_mut().write_all(b"{\"say\":\"nothing that there is\"}\n").unwrap();
    assert!(matches!(hear(&mut bad), FromService::Rejected { why } if why.contains("cannot be read")));
    let mut rest = String::new();
    assert_eq!(bad.read_to_string(&mut rest).unwrap(), 0);
    let mut second = join(&service, "good", 2);
    assert!(matches!(hear(&mut second), FromService::Rejected { why } if why.contains("MISSION_CLUSTER")));
    say(&mut good, &ToService::Here { version: 1, words: 2 });
    assert!(matches!(hear(&mut good), FromService::Here { version: 1, .. }));
}
