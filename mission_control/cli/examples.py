"""Examples at the end of the help of each command, by how it is typed after `mission`.

They are one table, so that a test parses each of them; docs/reference/command-line.md has them, too.
"""

from __future__ import annotations

SERVICE = "--service https://HOST:8790 --token-file"
EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("mission demo", "mission demo --results /tmp/demo --json"),
    "doctor": ("mission doctor", "mission doctor --scheduler tcp://HOST:8786 --json"),
    "run": (
        "mission run sort --size 256MiB --transport tcp",
        "mission run sort --size 1GiB --compare tcp,auto --repeat 5",
        "mission run scenarios/incast-cure.toml --compare 'modern, all,modern, auto'",
        "mission run ./mine.toml --in lab --set stack.rto_min=10ms",
        "mission run --resume results/ID",
    ),
    "replay": (
        "mission replay sample --scale 0.01 --minutes 10",
        "mission replay trace.tsv --hosts 8 --compare fair,fifo --repeat 3",
    ),
    "trace info": ("mission trace info sample", "mission trace info trace.tsv --json"),
    "trace synth": (
        "mission trace synth --out new.tsv --hours 0.5 --hosts 8",
        "mission trace synth --out new.tsv --from trace.tsv --window 0.25 --force",
    ),
    "report": ("mission report results/ID",),
    "schema": ("mission schema result",),
    "top": (
        "mission top --scheduler tcp://HOST:8786",
        f"mission top {SERVICE} viewer.token --most 20",
        "mission top --scheduler tcp://HOST:8786 --count 1 --json",
    ),
    "jobs": ("mission jobs --scheduler tcp://HOST:8786", f"mission jobs {SERVICE} viewer.token --json"),
    "jobs set": (
        "mission jobs set sort --priority 2 --scheduler tcp://HOST:8786",
        f"mission jobs set CLUSTER/sort --transport tls {SERVICE} operator.token",
    ),
    "explain": (
        "mission explain sort --scheduler tcp://HOST:8786",
        f"mission explain CLUSTER/sort {SERVICE} viewer.token",
    ),
    "weights": (
        "mission weights a:priority=1 b:priority=2 --policy priority",
        "mission weights a/model:pattern=broadcast a/sort b",
        "mission weights large:bytes=1GiB small:bytes=1MiB --policy smallest-bottleneck-first",
    ),
    "serve": (
        "mission serve",
        "mission serve --listen 0.0.0.0:8790 --certificate cert.pem --key key.pem --store etcd://10.0.0.1:2379",
    ),
    "service status": (f"mission service status {SERVICE} viewer.token",),
    "service policy": (f"mission service policy fair {SERVICE} operator.token",),
    "service set": (f"mission service set CLUSTER/sort --priority 2 {SERVICE} operator.token",),
    "service drain": (
        f"mission service drain host7 {SERVICE} operator.token",
        f"mission service drain host7 --undo {SERVICE} operator.token",
    ),
    "service history": (f"mission service history --most 20 {SERVICE} viewer.token",),
    "lab up": (
        "mission lab up star --hosts 8 --link-rate 100Mbit/s --buffer 64KiB",
        "mission lab up two-rack --name racks",
        "mission lab up mine.toml",
    ),
    "lab down": ("mission lab down", "mission lab down --all"),
    "lab exec": ("mission lab exec h1 -- ping -c 1 h2",),
    "lab link": ("mission lab link h3 down", "mission lab link h3 rate 10Mbit/s"),
    "lab show": ("mission lab show", "mission lab show --name racks --json"),
    "lab trace": ("mission lab trace --seconds 10 > queues.csv",),
    "lab check": ("mission lab check",),
    "incast predict": (
        "mission incast predict --fragment 16kB,64kB --link 1Gbit/s --buffer 64KiB",
        "mission incast predict --total 1MB --senders 1-100 --rto 10ms --json",
    ),
    "incast advise": (
        "mission incast advise --senders 40 --fragment 64kB --link 10Gbit/s --buffer 512KiB",
        "mission incast advise --from-run results/ID",
    ),
    "incast fit": ("mission incast fit results/ID",),
    "incast serve": ("mission incast serve", "mission incast serve --bind 0.0.0.0 --token-file secret"),
    "incast measure": (
        "mission incast measure --from h1:7001,h2:7001 --fragment 64kB --token-file secret",
        "mission incast measure --from 127.0.0.1:7001 --total 1MB --concurrent auto --json",
    ),
    "exec": (
        "mission exec --transport dctcp -- iperf3 -c HOST",
        "mission exec --rto-min 5ms --pace 50Mbit/s --report had.json -- COMMAND",
    ),
    "bench transfer": ("mission bench transfer --size 16MiB --transport tcp --no-workers",),
    "bench sort": ("mission bench sort --size 256MiB --rounds 3",),
    "bench dask": ("mission bench dask --case shuffle --size 256MiB --rounds 3",),
    "bench queries": ("mission bench queries --query q3 --scale 0.1",),
    "bench overhead": ("mission bench overhead --rounds 10",),
    "bench messages": ("mission bench messages --rounds 3",),
    "bench streams": ("mission bench streams --size 256MiB",),
    "bench delegates": ("mission bench delegates --steps 100 --rounds 3",),
    "bench mapreduce": ("mission bench mapreduce --size 256MiB",),
    "bench broadcast": ("mission bench broadcast --receivers 8 --size 8MiB --rate 256Mbit/s",),
    "bench retirement": ("mission bench retirement --size 256MiB --objects 16",),
    "bench paths": ("mission bench paths --pairs 2 --single 1 --rate 20Mbit/s",),
    "bench idle": ("mission bench idle --hosts 4 --seconds 10",),
    "bench service": ("mission bench service --rounds 5",),
    "bench served": ("mission bench served --rounds 10",),
    "bench sessions": ("mission bench sessions --rounds 10",),
    "bench console": ("mission bench console --pictures /tmp/pictures",),
    "bench decisions": ("mission bench decisions --json",),
    "bench incast": ("mission bench incast --settings 5 --seed 2",),
    "bench report": ("mission bench report --only share --only idle", "mission bench report --json"),
    "bench advice": ("mission bench advice --settings 3 --seed 2",),
}
