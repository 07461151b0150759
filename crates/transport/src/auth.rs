//! Proving that one knows the cluster's token without sending it.
//!
//! Both ends choose a nonce; each proves its knowledge by an HMAC-SHA256 over its role and both nonces, so a proof can
//! neither be replayed nor turned around. On plain connections this keeps other tenants out; it does not hide bytes.

use crate::object::to_hex;
use aws_lc_rs::hmac;

pub type Nonce = [u8; 16];

/// The secret of a cluster; never written to a log or a wire.
#[derive(Clone)]
pub struct Token(hmac::Key);

#[derive(Clone, Copy)]
pub enum Role {
    Client,
    Server,
}

impl Token {
    pub fn new(secret: &[u8]) -> Token {
        Token(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }

    pub fn prove(&self, role: Role, client: &Nonce, server: &Nonce) -> String {
        to_hex(hmac::sign(&self.0, &message(role, client, server)).as_ref())
    }

    pub fn proves(&self, role: Role, client: &Nonce, server: &Nonce, proof: &str) -> bool {
        let Some(proof) = crate::object::from_hex(proof) else { return false };
        hmac::verify(&self.0, &message(role, client, server), &proof).is_ok()
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(secret)")
    }
}

fn message(role: Role, client: &Nonce, server: &Nonce) -> Vec<u8> {
    let role: &[u8] = match role {
        Role::Client => b"mission-control client ",
        Role::Server => b"mission-control server ",
    };
    [role, client, server].concat()
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
        let proof = token.prove(Role::Client, &client, &server);
        assert!(token.proves(Role::Client, &client, &server, &proof));
        assert!(!token.proves(Role::Server, &client, &server, &proof));
        assert!(!token.proves(Role::Client, &server, &client, &proof));
        assert!(!Token::new(b"other").proves(Role::Client, &client, &server, &proof));
        assert!(!token.proves(Role::Client, &client, &server, "no hex"));
        assert!(!format!("{token:?}").contains("secret\""));
    }
}
