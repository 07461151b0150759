//! Compiles the eBPF programs with clang; their objects are embedded, so that users need no compiler.

use std::path::PathBuf;
use std::process::Command;

const PROGRAMS: [&str; 4] = ["bond", "dctcp", "port", "transport"];

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    // libbpf's own headers, of the version that is linked.
    let headers = std::env::var("DEP_BPF_INCLUDE").expect("libbpf-sys tells it");
    let machine = std::env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-env-changed=CLANG");
    let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang".into());
    for program in PROGRAMS {
        let status = Command::new(&clang)
            .args(["-O2", "-g", "-Wall", "-Werror", "-target", "bpf", "-c"])
            .arg(format!("-I{headers}"))
            .arg(if machine == "aarch64" { "-D__TARGET_ARCH_arm64" } else { "-D__TARGET_ARCH_x86" })
            // Where Debian keeps <asm/types.h>.
            .arg(format!("-I/usr/include/{machine}-linux-gnu"))
            .arg(format!("bpf/{program}.bpf.c"))
            .arg("-o")
            .arg(out.join(format!("{program}.bpf.o")))
            .status();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => panic!("{clang} could not compile bpf/{program}.bpf.c ({status})"),
            Err(error) => panic!("{clang}: {error}: install clang, or build without the feature `kernel`"),
        }
    }
}
