//! Settings of a replica.

use crate::store::Store;
use crate::store::etcd::Etcd;
use crate::store::file::FileStore;
use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA256, digest};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use ureq::tls::{Certificate, ClientCert, RootCerts, TlsConfig, TlsProvider};

#[derive(Clone, Deserialize)]
pub struct Settings {
    /// Of the service: replicas of one name in one store are one service.
    pub name: String,
    pub listen: SocketAddr,
    /// Where members find this replica, as they know it: `https://HOST:PORT`.
    pub address: String,
    /// `etcd://HOST:PORT,..`, or a folder.
    pub store: String,
    pub policy: String,
    pub tokens: Tokens,
    /// Certificate chain and key, PEM; `None`: plain text.
    #[serde(default)]
    pub certificate: Option<(String, String)>,
    /// Authorities of etcd's certificate, PEM; `None`: connections to etcd are plain text.
    #[serde(default)]
    pub store_ca: Option<String>,
    /// Client certificate chain and key for etcd, PEM.
    #[serde(default)]
    pub store_certificate: Option<(String, String)>,
}

/// Tokens of users and clusters.
#[derive(Clone, Deserialize)]
pub struct Tokens {
    /// Token that allows changes.
    pub operator: String,
    /// Token that allows reading.
    pub viewer: String,
    /// Token of the clusters that join.
    pub cluster: String,
}

/// What a token allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    Nothing,
    Look,
    Change,
    Join,
}

impl Tokens {
    /// The same where the tokens are the same; the tokens cannot be found from it, as they are random.
    pub fn fingerprint(&self) -> String {
        let all = format!("mission-control tokens\n{}\n{}\n{}", self.operator, self.viewer, self.cluster);
        let hash = digest(&SHA256, all.as_bytes());
        hash.as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub fn allow(&self, shown: Option<&str>) -> Allowed {
        let is = |own: &str| {
            !own.is_empty()
                && shown.is_some_and(|shown| verify_slices_are_equal(own.as_bytes(), shown.as_bytes()).is_ok())
        };
        match () {
            () if is(&self.operator) => Allowed::Change,
            () if is(&self.viewer) => Allowed::Look,
            () if is(&self.cluster) => Allowed::Join,
            () => Allowed::Nothing,
        }
    }
}

impl Settings {
    /// # Errors
    /// One line: why the store cannot be used.
    pub fn store(&self) -> Result<Arc<dyn Store>, String> {
        if let Some(members) = self.store.strip_prefix("etcd://") {
            let members: Vec<String> = members.split(',').filter(|one| !one.is_empty()).map(str::to_owned).collect();
            return Ok(Arc::new(Etcd::new(&members, &self.name, self.store_tls()?)?));
        }
        Ok(Arc::new(FileStore::open(Path::new(&self.store))?))
    }

    fn store_tls(&self) -> Result<Option<TlsConfig>, String> {
        let Some(ca) = &self.store_ca else {
            return match self.store_certificate {
                Some(_) => {
                    Err("--store-certificate without --store-ca: add the authority of etcd's own certificate".into())
                }
                None => Ok(None),
            };
        };
        let text = |error: &dyn std::fmt::Display| format!("certificates of the store: {error}");
        let read = |pem: &str| -> Result<Vec<Certificate<'static>>, String> {
            let read = CertificateDer::pem_slice_iter(pem.as_bytes());
            let read =
                read.map(|one| one.map(|own| Certificate::from_der(&own).to_owned())).collect::<Result<Vec<_>, _>>();
            match read {
                Ok(some) if some.is_empty() => Err(text(&"the file has no certificate")),
                other => other.map_err(|error| text(&error)),
            }
        };
        let mut tls = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .unversioned_rustls_crypto_provider(Arc::new(default_provider()))
            .root_certs(RootCerts::new_with_certs(&read(ca)?));
        if let Some((chain, key)) = &self.store_certificate {
            let key = ureq::tls::PrivateKey::from_pem(key.as_bytes()).map_err(|error| text(&error))?;
            tls = tls.client_cert(Some(ClientCert::new_with_certs(&read(chain)?, key)));
        }
        Ok(Some(tls.build()))
    }

    /// # Errors
    /// The certificate cannot be read, or the key does not match it.
    pub fn tls(&self) -> Result<Option<Arc<ServerConfig>>, String> {
        let Some((chain, key)) = &self.certificate else { return Ok(None) };
        let text = |error: &dyn std::fmt::Display| format!("certificate of the service: {error}");
        let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(|error| text(&error))?;
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| text(&error))?;
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| text(&error))?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(|error| text(&error))?;
        Ok(Some(Arc::new(config)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_allows_what_it_is_for_and_an_empty_one_nothing() {
        let tokens = Tokens { operator: "op".into(), viewer: "view".into(), cluster: String::new() };
        assert_eq!(tokens.allow(Some("op")), Allowed::Change);
        assert_eq!(tokens.allow(Some("view")), Allowed::Look);
        assert_eq!(tokens.allow(Some("")), Allowed::Nothing);
        assert_eq!(tokens.allow(Some("opp")), Allowed::Nothing);
        assert_eq!(tokens.allow(None), Allowed::Nothing);
    }
}
