//! Names of objects.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// 128 random bits, written as 32 hexadecimal digits: the name of an object cannot be guessed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct ObjectId(pub [u8; 16]);

impl ObjectId {
    pub fn random() -> ObjectId {
        ObjectId(crate::auth::random())
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_hex(&self.0))
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ObjectId {
    type Err = String;

    fn from_str(text: &str) -> Result<ObjectId, String> {
        let bytes = from_hex(text).and_then(|bytes| bytes.try_into().ok());
        bytes.map(ObjectId).ok_or_else(|| format!("{text:?} is no object: 32 hexadecimal digits are"))
    }
}

impl From<ObjectId> for String {
    fn from(id: ObjectId) -> String {
        id.to_string()
    }
}

impl TryFrom<String> for ObjectId {
    type Error = String;

    fn try_from(text: String) -> Result<ObjectId, String> {
        text.parse()
    }
}

pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes of a text of lower-case hexadecimal digits; `None` for anything else.
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    if !text.len().is_multiple_of(2) {
        return None;
    }
    text.as_bytes().chunks(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}
