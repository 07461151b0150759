//! One process's instance of the data plane: its store, its server and its fetcher.

use crate::arbiter::Numbers;
use crate::auth::Token;
use crate::carrier::shm::Lender;
use crate::carrier::{self, Context};
use crate::clock;
use crate::control::Control;
use crate::fetcher::Fetcher;
use crate::handover::Taker;
use crate::host;
use crate::in_force::InForce;
use crate::object::ObjectId;
use crate::parts::{FetchRequest, Fetched};
use crate::probe;
use crate::segment::{Cohort, Pool, Segment};
use crate::server::Server;
use crate::session::Session;
use crate::store::Store;
use crate::streams::{Opening, Streams};
use crate::tls::{Identity, TlsSettings};
use crate::uplink::Uplink;
use crate::windows::Governor;
use mission_core::ecn::Seen;
use mission_core::flight::Environment;
use mission_core::host::fetches::{Fault, FetchError};
use mission_core::shares::FlowsPerHost;
use mission_core::types::{Demands, Encryption, JobId};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

pub struct Settings {
    /// Address of this machine on which parts are served.
    pub host: IpAddr,
    /// Ports to serve them at: the first that is free; 0 is any that is free.
    pub ports: Vec<u16>,
    /// Secret of the cluster.
    pub token: Vec<u8>,
    /// Its name in the control service, if it is a member of one.
    pub cluster: Option<String>,
    /// Secret of the clusters that share this host's slots, if there are several.
    pub host_token: Option<Vec<u8>>,
    /// Certificates of the cluster, if its own channel has them.
    pub identity: Option<Identity>,
    /// Nothing leaves this process unencrypted.
    pub requires_encryption: bool,
    /// Bytes of own segments before objects go to the spool.
    pub memory_limit: u64,
    pub spool_folder: PathBuf,
    pub flows_per_host: FlowsPerHost,
    /// Limit on the bytes per second that this process sends, over all connections.
    pub send_limit: Option<u64>,
}

// Fields are dropped in this order: the server before the store, so that nothing is served from a store that closes.
pub struct Endpoint {
    pub(crate) session: Session,
    pub(crate) in_force: Arc<InForce>,
    pub(crate) taker: Taker,
    pub server: Server,
    _lender: Option<Lender>,
    pub fetcher: Arc<Fetcher>,
    pub streams: Arc<Streams>,
    pub store: Arc<Store>,
    pub pool: Arc<Pool>,
    pub host: String,
    pub environment: Environment,
    /// What this process cannot do, and why; everything else works.
    pub problems: Vec<String>,
    pub(crate) context: Context,
    pub(crate) control: Arc<Control>,
}

/// What an endpoint holds now. All of it returns to 0 when nothing is active and everything is freed.
#[derive(Debug, Serialize)]
pub struct Resources {
    pub objects: usize,
    /// That this process writes, or has written and not freed.
    pub streams: usize,
    /// Parts of others' objects that were received in broadcasts.
    pub copies: usize,
    pub live_bytes: u64,
    /// Of results that the engine accounts for.
    pub result_bytes: u64,
    pub kept_bytes: u64,
    pub spooled_bytes: u64,
    pub sent_bytes: u64,
    pub serving_connections: usize,
    pub fetching_connections: u32,
    pub kept_connections: usize,
    pub gives_out_slots: bool,
    pub has_neighbours: bool,
}

impl Endpoint {
    /// # Errors
    /// The address is not this machine's, or the certificates are wrong.
    pub fn new(settings: Settings) -> io::Result<Endpoint> {
        raise_descriptor_limit();
        let token = Token::new(&settings.token);
        let mut problems = Vec::new();
        // Certificates that the engine accepts may be invalid here. Then there is no authenticated encryption, and jobs
        // that demand it are refused.
        let mut encrypts = settings.identity.is_some();
        let tls = TlsSettings::new(settings.identity.as_ref()).or_else(|why| {
            problems.push(format!("the cluster's certificates cannot be used, so nothing is authenticated: {why}"));
            encrypts = false;
            TlsSettings::new(None)
        });
        let tls = tls.map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        let environment = Environment { requires_encryption: settings.requires_encryption, ..environment(encrypts)? };
        let governor = environment.link_bits_per_sec.map(Governor::start).transpose()?.map(Arc::new);
        let numbers = Numbers::new(settings.cluster.as_deref());
        let context = Context { token, tls, numbers, governor, turns: Arc::default() };
        // The pool keeps as much free memory as objects may take: a worker that was busy will be busy again.
        let pool = Pool::new(usize::try_from(settings.memory_limit).unwrap_or(usize::MAX));
        let store = Arc::new(Store::new(pool.clone(), settings.memory_limit, settings.spool_folder));
        let streams = Arc::new(Streams::new(store.clone()));
        let uplink = Arc::new(Uplink::new(settings.flows_per_host, environment.link_bits_per_sec));
        let server = Server::new(
            settings.host,
            &settings.ports,
            store.clone(),
            streams.clone(),
            context.clone(),
            settings.send_limit,
            uplink.clone(),
        )?;
        let host = host::host_id()?;
        let cluster = host::cluster_name(&settings.token);
        let lender = Lender::new(&cluster, server.address(), context.token.clone(), store.clone());
        if let Err(error) = &lender {
            problems.push(format!("memory is not shared with other processes of this host: {error}"));
        }
        let shared = settings.host_token.as_ref().map(|token| (host::cluster_name(token), Token::new(token)));
        let slots = match &shared {
            Some((name, token)) => (name.as_str(), token.clone()),
            None => (cluster.as_str(), context.token.clone()),
        };
        let fetcher = Fetcher::new(
            context.clone(),
            environment.clone(),
            store.clone(),
            streams.clone(),
            pool.clone(),
            server.address(),
            &cluster,
            slots,
            settings.flows_per_host,
        )?;
        problems.extend(fetcher.arbitrates_alone());
        let (fetcher, control) = (Arc::new(fetcher), Arc::new(Control::default()));
        let in_force = Arc::new(InForce::new(fetcher.clone(), uplink, context.numbers.clone()));
        let session = Session::new(&cluster, context.token.clone(), server.address(), &in_force);
        let taker = Taker::new(fetcher.clone(), store.clone(), control.clone())?;
        Ok(Endpoint {
            session,
            taker,
            server,
            _lender: lender.ok(),
            problems,
            fetcher,
            streams,
            store,
            pool,
            host,
            environment,
            context,
            control,
            in_force,
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Allocates memory for an object that a job is going to put; objects of one cohort are freed together.
    ///
    /// # Errors
    /// The kernel has no memory to map.
    pub fn allocate(&self, len: usize, job: &JobId, demands: &Demands, cohort: Cohort) -> io::Result<Segment> {
        self.pool.take_of(cohort, len, self.fetcher.sharers(job, demands))
    }

    pub fn put(&self, parts: &[&[u8]], job: &JobId, demands: &Demands) -> io::Result<ObjectId> {
        self.store.put(parts, self.encryption(demands.encrypt), self.fetcher.sharers(job, demands))
    }

    pub fn adopt(&self, segment: Arc<Segment>, sizes: &[u64], encryption: Encryption) -> io::Result<ObjectId> {
        self.store.adopt(segment, sizes, self.encryption(encryption))
    }

    /// Opens a stream of a job.
    ///
    /// # Errors
    /// It has no part, or too many.
    pub fn open_stream(
        &self,
        job: &JobId,
        demands: &Demands,
        parts: u32,
        ahead_bytes: u64,
        keep: bool,
    ) -> io::Result<ObjectId> {
        let (encryption, sharers) = (self.encryption(demands.encrypt), self.fetcher.sharers(job, demands));
        self.streams.open(&Opening { parts, ahead_bytes, keep, encryption, sharers })
    }

    /// The protection that an object of a job with these demands needs.
    fn encryption(&self, demanded: Encryption) -> Encryption {
        let required = if self.environment.requires_encryption { Encryption::Authenticated } else { Encryption::None };
        demanded.max(required)
    }

    /// Frees an object, or the copies of another process's; false if this process had no such object.
    pub fn free(&self, object: &ObjectId) -> bool {
        // The store first: a receiver that asks then finds no object, and registers no new broadcast.
        let freed = self.store.free(object) | self.streams.free(object);
        self.server.forget(object);
        self.fetcher.forget_location(object);
        freed
    }

    pub fn fetch(&self, request: FetchRequest, interrupted: impl FnMut() -> bool) -> Result<Fetched, FetchError> {
        self.fetcher.fetch(request, interrupted)
    }

    /// As [`Fetcher::receive`].
    ///
    /// # Errors
    /// As there.
    pub fn receive(
        &self,
        request: FetchRequest,
        interrupted: impl FnMut() -> bool,
    ) -> Result<Vec<Arc<Segment>>, FetchError> {
        self.fetcher.receive(request, interrupted)
    }

    /// Has others send to this process at the same time, and reports what happened to their packets.
    ///
    /// # Errors
    /// One of them cannot be reached.
    pub fn probe_ecn(&self, senders: &[SocketAddr]) -> Result<Seen, Fault> {
        probe::ecn(senders, &self.context)
    }

    pub fn resources(&self) -> Resources {
        let (fetching_connections, kept_connections) = self.fetcher.connections();
        Resources {
            objects: self.store.len(),
            streams: self.streams.len(),
            copies: self.store.copies.len(),
            live_bytes: self.pool.live_bytes(),
            result_bytes: self.pool.result_bytes(),
            kept_bytes: self.pool.free_bytes(),
            spooled_bytes: self.store.spooled_bytes(),
            sent_bytes: self.server.sent_bytes(),
            serving_connections: self.server.connections(),
            fetching_connections,
            kept_connections,
            gives_out_slots: self.fetcher.gives_out_slots(),
            has_neighbours: self.fetcher.has_neighbours(),
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // End active fetches.
        self.fetcher.abandon();
    }
}

/// Raises this process's limit of open descriptors as far as it may: connections and shared memory need many.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current < limit.maximum || limit.maximum.is_none() && limit.current.is_some() {
        // If that is refused the limit stays, and shared memory uses its fraction of it.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    }
}

/// Detects what this process and its host can do.
///
/// # Errors
/// The configured rate of the link is invalid.
pub fn environment(engine_tls: bool) -> io::Result<Environment> {
    let allowed = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control").unwrap_or_default();
    Ok(Environment {
        carriers: carrier::transports(),
        interfaces: host::interfaces().len().max(1) as u32,
        link_bits_per_sec: host::link_rate()?,
        slow_motion: Some(clock::slow_motion()?).filter(|slow| *slow > 1),
        // Unknown: the Mission Controller has it measured.
        ecn: None,
        congestion_controls: allowed.split_whitespace().map(str::to_owned).collect(),
        engine_tls,
        requires_encryption: false,
    })
}

#[cfg(test)]
pub(crate) mod tests;
