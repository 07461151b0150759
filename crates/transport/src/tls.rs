//! Settings of TLS 1.3: authenticated by the cluster's certificates, or opportunistic.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use std::sync::Arc;

/// The server name of a client hello says which of the two a client wants; both share one port.
pub const AUTHENTICATED: &str = "authenticated.mission";
pub const OPPORTUNISTIC: &str = "opportunistic.mission";

/// Certificates of the cluster, in PEM.
pub struct Identity {
    pub ca: Vec<u8>,
    pub certificate: Vec<u8>,
    pub key: Vec<u8>,
}

/// One kind of encryption: both ends' settings.
#[derive(Clone)]
pub struct Ends {
    pub client: Arc<ClientConfig>,
    pub server: Arc<ServerConfig>,
}

#[derive(Clone)]
pub struct TlsSettings {
    pub opportunistic: Ends,
    /// Absent where the engine's own channel has no certificates.
    pub authenticated: Option<Ends>,
}

impl TlsSettings {
    /// # Errors
    /// The certificates cannot be read, or the key does not match them.
    pub fn new(identity: Option<&Identity>) -> Result<TlsSettings, String> {
        let authenticated = identity.map(authenticated).transpose()?;
        Ok(TlsSettings { opportunistic: opportunistic()?, authenticated })
    }
}

/// AES-128-GCM first: the fastest if the CPU has AES instructions (FACTS: 1020 MB/s on one core).
fn provider() -> Arc<CryptoProvider> {
    use aws_lc_rs::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256};
    let suites = vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
    Arc::new(CryptoProvider { cipher_suites: suites, ..aws_lc_rs::default_provider() })
}

fn text(error: impl std::fmt::Display) -> String {
    format!("TLS: {error}")
}

fn opportunistic() -> Result<Ends, String> {
    let own = rcgen::generate_simple_self_signed([OPPORTUNISTIC.to_owned()]).map_err(text)?;
    let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).map_err(text)?;
    let server = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(text)?
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key)
        .map_err(text)?;
    let client = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(text)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider())))
        .with_no_client_auth();
    Ok(Ends { client: Arc::new(client), server: Arc::new(server) })
}

fn authenticated(identity: &Identity) -> Result<Ends, String> {
    let read = |pem: &[u8]| CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>().map_err(text);
    let key = || PrivateKeyDer::from_pem_slice(&identity.key).map_err(text);
    let mut roots = RootCertStore::empty();
    for root in read(&identity.ca)? {
        roots.add(root).map_err(text)?;
    }
    let roots = Arc::new(roots);
    let own = read(&identity.certificate)?;
    let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider()).build().map_err(text)?;
    let servers = OfTheCluster { roots, provider: provider() };
    // Detect now what peers would refuse: version 1 of X.509, or another authority.
    let (first, chain) = own.split_first().ok_or("TLS: the PEM text has no certificate")?;
    servers.verify(first, chain, UnixTime::now()).map_err(text)?;
    let server = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(text)?
        .with_client_cert_verifier(clients)
        .with_single_cert(own.clone(), key()?)
        .map_err(text)?;
    let client = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(text)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(servers))
        .with_client_auth_cert(own, key()?)
        .map_err(text)?;
    Ok(Ends { client: Arc::new(client), server: Arc::new(server) })
}

/// A certificate that the cluster's authority signed, whatever name it bears: workers come and go by address, and
/// Dask's own channel checks no names either. Who may join is decided by the token, which each end proves in the session.
#[derive(Debug)]
struct OfTheCluster {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl OfTheCluster {
    fn verify(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &self.roots, intermediates, now, algorithms)
    }
}

impl ServerCertVerifier for OfTheCluster {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.verify(end_entity, intermediates, now).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Opportunistic: no identity is requested or checked; the peer still has to own the key that it presents.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
