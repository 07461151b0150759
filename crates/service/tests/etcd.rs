//! The store in a real etcd: three members on loopback, of which one is stopped or killed. Skipped, with one line, where
//! there is no etcd.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use mission_core::service::Entry;
use mission_service::settings::{Settings, Tokens};
use mission_service::store::etcd::Etcd;
use mission_service::store::{Changed, Failure, Store};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use serde_json::json;
use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Cluster {
    members: Vec<Child>,
    clients: Vec<String>,
    folder: PathBuf,
}

/// Ports without a listener now.
fn ports(count: usize) -> Vec<u16> {
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

impl Cluster {
    /// `None`: there is no etcd.
    fn start(name: &str) -> Option<Cluster> {
        if Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_err() {
            // Not by `println!`, which a test that passes does not show.
            let _ = writeln!(std::io::stderr(), "skipped: there is no etcd on the path (Debian: etcd-server)");
            return None;
        }
        // Another program may take a port before etcd does.
        let started = (0..3).find_map(|_| Cluster::try_start(name));
        Some(started.expect("etcd comes up, in one of three tries"))
    }

    fn try_start(name: &str) -> Option<Cluster> {
        // In memory where that can be: a slow disk is not what is tested.
        let memory = PathBuf::from("/dev/shm");
        let folder = if memory.is_dir() { memory } else { std::env::temp_dir() };
        let folder = folder.join(format!("mission-etcd-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let ports = ports(6);
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let peers: Vec<String> = (0..3).map(|member| format!("m{member}={}", url(ports[3 + member]))).collect();
        let member = |member: usize| {
            let (client, peer) = (url(ports[member]), url(ports[3 + member]));
            Command::new("etcd")
                .args(["--name", &format!("m{member}"), "--data-dir"])
                .arg(folder.join(format!("m{member}")))
                .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
                .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
                .args(["--initial-cluster", &peers.join(","), "--initial-cluster-state", "new"])
                .args(["--logger", "zap", "--log-level", "error"])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        };
        let members = (0..3).map(member).collect();
        let clients = ports[..3].iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let mut cluster = Cluster { members, clients, folder };
        let store = cluster.store();
        let end = Instant::now() + Duration::from_secs(30);
        while store.load().is_err() {
            let over = cluster.members.iter_mut().any(|member| !matches!(member.try_wait(), Ok(None)));
            if over || Instant::now() >= end {
                return None;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Some(cluster)
    }

    fn store(&self) -> Etcd {
        Etcd::new(&self.clients, "test", None).unwrap()
    }

    /// A write as `Etcd::write` sends it, of this epoch, after the one of this revision. Returns etcd's answer.
    fn late(&self, epoch: u64, after: u64, policy: &str) -> String {
        let key = |key: &str| STANDARD.encode(format!("/mission-control/test/{key}"));
        let (leader, sequence) = (key("leader"), key("sequence"));
        let body = json!({
            "compare": [
                {"key": leader, "target": "CREATE", "result": "EQUAL", "create_revision": epoch.to_string()},
                {"key": sequence, "target": "MOD", "result": "EQUAL", "mod_revision": after.to_string()},
            ],
            "success": [
                {"request_put": {"key": sequence, "value": STANDARD.encode("0/0")}},
                {"request_put": {"key": key("policy"), "value": STANDARD.encode(policy)}},
            ],
            "failure": [{"request_range": {"key": leader}}, {"request_range": {"key": sequence}}],
        });
        let url = format!("http://{}/v3/kv/txn", self.clients[0]);
        ureq::post(url).send(body.to_string()).unwrap().body_mut().read_to_string().unwrap()
    }

    fn signal(&self, member: usize, signal: &str) {
        let pid = self.members[member].id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for member in &mut self.members {
            let _ = member.kill();
            let _ = member.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn entry(key: &str, value: &str) -> Entry {
    (key.into(), Some(value.into()))
}

/// What is written of the policy.
fn value(change: &Changed) -> Option<String> {
    change.entries.iter().find(|(key, _)| key == "policy")?.1.clone()
}

/// Until it is so, within 30 s.
fn wait<T>(what: &str, mut get: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(got) = get() {
            return got;
        }
        assert!(Instant::now() < end, "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn one_leads_and_who_led_before_writes_nothing() {
    let Some(cluster) = Cluster::start("lead") else { return };
    let (first, second) = (cluster.store(), cluster.store());
    let elected = first.campaign("first").unwrap().unwrap();
    assert_eq!(second.campaign("second"), Ok(None));
    assert_eq!(
        first.campaign("first").unwrap().map(|again| again.epoch),
        Some(elected.epoch),
        "an answer that was lost"
    );
    first.write(elected.epoch, &[entry("policy", "\"fair\""), entry("job/a%2Fb/c", "{}")]).unwrap();
    assert!(first.renew().unwrap() > elected.until);
    let loaded = second.load().unwrap();
    assert_eq!(loaded.leader.as_deref(), Some("first"));
    assert_eq!(loaded.entries, [entry("job/a%2Fb/c", "{}"), entry("policy", "\"fair\"")]);
    // It is stopped: its lease ends, and another leads.
    let later = wait("the lease ends", || second.campaign("second").unwrap());
    assert!(later.epoch > elected.epoch);
    assert_eq!(first.renew(), Err(Failure::NotLeader));
    assert_eq!(first.write(elected.epoch, &[entry("policy", "\"fifo\"")]), Err(Failure::NotLeader));
    second.resign();
    wait("the key is free at once", || first.campaign("first").unwrap());
}

#[test]
fn changes_come_in_order_to_everybody_also_when_a_member_is_stopped() {
    let Some(cluster) = Cluster::start("watch") else { return };
    let (writer, reader) = (cluster.store(), cluster.store());
    let from = reader.load().unwrap().revision;
    let elected = writer.campaign("writer").unwrap().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    let written = std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let (mut seen, mut after) = (Vec::<Changed>::new(), from);
            let is_last = |seen: &[Changed]| seen.last().is_some_and(|last| value(last).as_deref() == Some("19"));
            while !is_last(&seen) {
                assert!(Instant::now() < end, "not within 60 s: the last change; seen: {seen:?}");
                // A watch that is silent, or breaks, is begun again where it ended.
                let _ = reader.watch(after, &mut |change| {
                    after = change.revision;
                    seen.push(change);
                    !is_last(&seen)
                });
                let _ = reader.load();
            }
            seen
        });
        let mut epoch = elected.epoch;
        for number in 0..20 {
            if number == 5 {
                cluster.signal(0, "-STOP");
            }
            if number == 15 {
                cluster.signal(0, "-CONT");
            }
            let entries = [entry("policy", &number.to_string()), (format!("gone/{number}"), None)];
            wait("a write", || {
                // On a busy machine its lease may end.
                let lost = writer.renew() == Err(Failure::NotLeader);
                if lost && let Ok(Some(again)) = writer.campaign("writer") {
                    epoch = again.epoch;
                }
                writer.write(epoch, &entries).ok()
            });
        }
        watching.join().unwrap()
    });
    assert_eq!(written[0].leader, Some(Some("writer".into())));
    let mut values: Vec<String> = written.iter().filter_map(value).collect();
    // A write with an unknown result was repeated: it may have happened twice.
    values.dedup();
    assert_eq!(values, (0..20).map(|number| number.to_string()).collect::<Vec<_>>());
    assert!(written.windows(2).all(|pair| pair[0].revision < pair[1].revision));
}

#[test]
fn a_write_that_lands_late_changes_nothing() {
    let Some(cluster) = Cluster::start("late") else { return };
    let store = cluster.store();
    let epoch = wait("the leader's key", || store.campaign("writer").unwrap()).epoch;
    let write = |value: &str| {
        wait("a write", || {
            let _ = store.renew();
            store.write(epoch, &[entry("policy", value)]).ok()
        })
    };
    write("\"fair\"");
    // Sent by itself, as a member of etcd does that was stopped with it: it comes after what the first one came after.
    let late = cluster.late(epoch, epoch, "\"fifo\"");
    assert!(late.contains("response_range"), "it has happened, or was not understood: {late}");
    // So has a write of this replica without an answer: the next write detects it, and is the last.
    let unheard = cluster.late(epoch, store.load().unwrap().revision, "\"fifo\"");
    assert!(unheard.contains("\"succeeded\":true"), "{unheard}");
    write("\"weighted\"");
    assert_eq!(store.load().unwrap().entries, [entry("policy", "\"weighted\"")]);
}

#[test]
fn without_most_members_nothing_is_answered_as_written() {
    let Some(mut cluster) = Cluster::start("most") else { return };
    let store = cluster.store();
    let epoch = store.campaign("writer").unwrap().unwrap().epoch;
    for member in [0, 1] {
        cluster.members[member].kill().unwrap();
        cluster.members[member].wait().unwrap();
    }
    let began = Instant::now();
    match store.write(epoch, &[entry("policy", "\"fair\"")]) {
        Err(Failure::Unknown(why)) => assert!(why.contains("etcd does not answer"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
}

#[test]
fn with_tls_both_ends_show_who_they_are() {
    if Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_err() {
        return;
    }
    let folder = std::env::temp_dir().join(format!("mission-etcd-tls-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let made = |name: &str| {
        let mut own = CertificateParams::new([name.to_owned()]).unwrap();
        own.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        own
    };
    let (ca_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut ca = CertificateParams::new(["ca".to_owned()]).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
    let issuer = Issuer::new(ca, ca_key);
    let own_pem = made("127.0.0.1").signed_by(&key, &issuer).unwrap().pem();
    let (ca_file, own_file, key_file) =
        (file("ca.pem", &ca_pem), file("own.pem", &own_pem), file("key.pem", &key.serialize_pem()));
    let ports = ports(2);
    let (client, peer) = (format!("https://127.0.0.1:{}", ports[0]), format!("http://127.0.0.1:{}", ports[1]));
    let mut member = Command::new("etcd")
        .args(["--name", "m", "--data-dir", folder.join("data").to_str().unwrap()])
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client, "--listen-peer-urls", &peer])
        .args(["--initial-advertise-peer-urls", &peer, "--initial-cluster", &format!("m={peer}")])
        .args(["--cert-file", &own_file, "--key-file", &key_file, "--trusted-ca-file", &ca_file, "--client-cert-auth"])
        .args(["--logger", "zap", "--log-level", "error"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let settings = |ca: Option<&str>, own: bool| Settings {
        name: "test".into(),
        listen: "127.0.0.1:0".parse().unwrap(),
        address: "http://127.0.0.1:1".into(),
        store: format!("etcd://127.0.0.1:{}", ports[0]),
        policy: "fair".into(),
        tokens: Tokens { operator: "o".into(), viewer: "v".into(), cluster: "c".into() },
        certificate: None,
        store_ca: ca.map(str::to_owned),
        store_certificate: own.then(|| (own_pem.clone(), key.serialize_pem())),
    };
    let store = settings(Some(&ca_pem), true).store().unwrap();
    let epoch = wait("the leader's key", || store.campaign("writer").ok().flatten()).epoch;
    store.write(epoch, &[entry("policy", "\"fair\"")]).unwrap();
    assert_eq!(store.load().unwrap().entries, [entry("policy", "\"fair\"")]);
    // Who shows nothing, who speaks in clear, and who does not know etcd's certificate get nothing.
    let other = made("other").self_signed(&key).unwrap().pem();
    for (ca, own) in [(Some(&*ca_pem), false), (None, false), (Some(&*other), true)] {
        assert!(matches!(settings(ca, own).store().unwrap().load(), Err(Failure::Unknown(_))), "{ca:?} {own}");
    }
    assert!(settings(None, true).store().err().unwrap().contains("--store-ca"));
    assert!(settings(Some("nonsense"), true).store().err().unwrap().contains("the file has no certificate"));
    member.kill().unwrap();
    member.wait().unwrap();
    let _ = std::fs::remove_dir_all(&folder);
}
