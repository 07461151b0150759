//! Proving that one knows the cluster's token without sending it.
//!
//! Both ends choose a nonce; each proves its knowledge by an HMAC-SHA256 over its role, both nonces and the connection's
//! purpose. So a proof can neither be replayed, nor turned around, nor used on another connection: over TLS the purpose
//! contains what only the two ends of the session know (RFC 9266), and a relay between them proves nothing.

use aws_lc_rs::hmac;

pub const NONCE_BYTES: usize = 16;
pub const PROOF_BYTES: usize = 32;
pub type Nonce = [u8; NONCE_BYTES];

/// The secret of a cluster; never written to a log or a wire.
#[derive(Clone)]
pub struct Token(hmac::Key);

#[derive(Clone, Copy)]
pub enum Role {
    Client,
    Server,
}

/// What a proof is for.
#[derive(Clone, Copy)]
pub enum Purpose<'a> {
    /// Ranges over a byte stream; over TLS, with the exporter of its session (RFC 9266), else empty.
    Ranges(&'a [u8]),
    /// What a process of the host offers at a socket of this name: without the name, the process behind another name
    /// could relay the proof.
    Socket(&'a [u8]),
}

impl Token {
    pub fn new(secret: &[u8]) -> Token {
        Token(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }

    pub fn prove(&self, role: Role, client: &Nonce, server: &Nonce, purpose: Purpose<'_>) -> [u8; PROOF_BYTES] {
        let tag = hmac::sign(&self.0, &message(role, client, server, purpose));
        tag.as_ref().try_into().expect("SHA-256 has 32 bytes")
    }

    pub fn proves(&self, role: Role, client: &Nonce, server: &Nonce, purpose: Purpose<'_>, proof: &[u8]) -> bool {
        hmac::verify(&self.0, &message(role, client, server, purpose), proof).is_ok()
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(secret)")
    }
}

fn message(role: Role, client: &Nonce, server: &Nonce, purpose: Purpose<'_>) -> Vec<u8> {
    let role: &[u8] = match role {
        Role::Client => b"mission-control client ",
        Role::Server => b"mission-control server ",
    };
    let (purpose, binding): (&[u8], &[u8]) = match purpose {
        Purpose::Ranges(binding) => (b" ranges ", binding),
        Purpose::Socket(name) => (b" socket ", name),
    };
    [role, client, server, purpose, binding].concat()
}

/// Random bytes from the kernel.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).expect("the kernel gives random bytes");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_role_its_nonces_and_its_token_only() {
        let token = Token::new(b"secret");
        let (client, server) = (random(), random());
        let proof = token.prove(Role::Client, &client, &server, Purpose::Ranges(b"session"));
        let proves = |token: &Token, role, one, other, purpose| token.proves(role, one, other, purpose, &proof);
        assert!(proves(&token, Role::Client, &client, &server, Purpose::Ranges(b"session")));
        assert!(!proves(&token, Role::Server, &client, &server, Purpose::Ranges(b"session")));
        assert!(!proves(&token, Role::Client, &server, &client, Purpose::Ranges(b"session")));
        assert!(!proves(&token, Role::Client, &client, &server, Purpose::Ranges(b"another session")));
        assert!(!proves(&token, Role::Client, &client, &server, Purpose::Socket(b"session")));
        assert!(!proves(&Token::new(b"other"), Role::Client, &client, &server, Purpose::Ranges(b"session")));
        assert!(!token.proves(Role::Client, &client, &server, Purpose::Ranges(b"session"), &proof[1..]));
        assert!(!format!("{token:?}").contains("secret\""));
    }
}
