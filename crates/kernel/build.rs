//! Compiles the eBPF programs and what is preloaded with clang; both are embedded, so that users need no compiler.

use std::path::PathBuf;
use std::process::Command;

const PROGRAMS: [&str; 5] = ["bond", "dctcp", "pass", "port", "transport"];

/// Libraries that are loaded ahead of a program's own; by the same compiler, for this machine.
const PRELOADS: [&str; 1] = ["mptcp"];

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    // libbpf's own headers, of the version that is linked.
    let headers = std::env::var("DEP_BPF_INCLUDE").expect("libbpf-sys tells it");
    let machine = std::env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-changed=preload");
    println!("cargo:rerun-if-env-changed=CLANG");
    let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang".into());
    for program in PROGRAMS {
        let mut command = Command::new(&clang);
        command
            .args(["-O2", "-g", "-Wall", "-Werror", "-target", "bpf", "-c"])
            .arg(format!("-I{headers}"))
            .arg(if machine == "aarch64" { "-D__TARGET_ARCH_arm64" } else { "-D__TARGET_ARCH_x86" })
            // Where Debian keeps <asm/types.h>.
            .arg(format!("-I/usr/include/{machine}-linux-gnu"))
            .arg(format!("bpf/{program}.bpf.c"))
            .arg("-o")
            .arg(out.join(format!("{program}.bpf.o")));
        compile(command);
    }
    for library in PRELOADS {
        let mut command = Command::new(&clang);
        command
            .args(["-O2", "-Wall", "-Werror", "-shared", "-fPIC"])
            .arg(format!("preload/{library}.c"))
            // Where the C library is older than 2.34.
            .arg("-ldl")
            .arg("-o")
            .arg(out.join(format!("{library}.so")));
        compile(command);
    }
}

fn compile(mut command: Command) {
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{command:?}: {status}"),
        Err(error) => panic!("{command:?}: {error}: install clang, or build without the feature `kernel`"),
    }
}
