"""A real one-node Kubernetes with Volcano and KubeRay, from Go modules: no image registry, no virtual machine.

Kubernetes 1.35 (etcd, API server, controller manager, scheduler, kubelet on containerd, kube-proxy, CoreDNS), Volcano
1.15 and the KubeRay operator 1.6 run as ordinary processes of this machine. The real node is called `node-a`; its
Neuron devices and EFA cards are extended resources in its status, as a device plugin would report them.

Everything that is made is below $CLUSTER_HOME (default .cluster), but for two bridges, iptables chains of kubelet's
that stay, and the folder of the local overlay's volume, which stays because it holds artifacts. Not covered:
NetworkPolicy is accepted and not enforced (bridge CNI), there is no LoadBalancer, and one node is real.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from images.build import require_engine
from services.common.errors import DeviceError
from services.common.process.shutdown import STOP_SIGNALS
from tests.cluster.kit.node_images import ctr, load
from tests.cluster.kit.processes import (
    ARTIFACTS,
    BIN,
    HOME,
    KUBECONFIG,
    LOG,
    PID,
    PKI,
    SOCKET,
    USER,
    kubectl,
    run,
    start,
    stop,
    wait,
)

HERE = Path(__file__).resolve().parent
ADDRESS = "172.31.77.1"  # of the control plane, on a bridge of its own: EndpointSlices refuse loopback
DNS_ADDRESS = "10.96.0.10"
SERVICE_RANGE = "10.96.0.0/16"
POD_RANGE = "10.250.0.0/24"

# What the machine must have: a command or a file, and the Debian packages that bring it.
PREREQUISITES = {
    "docker": "docker.io",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "openssl": "openssl",
    "gcc": "gcc libc6-dev",
}

KUBERNETES = "v1.35.4"
KUBERAY = "kuberay-operator"
PACKAGES = {  # binary -> package of the module in go.mod
    "etcd": "./etcd",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "volcano-scheduler": "volcano.sh/volcano/cmd/scheduler",
    "volcano-controller": "volcano.sh/volcano/cmd/controller-manager",
}
TOOLS = {  # binary -> package@version with a module graph of its own
    "ray-operator": "github.com/ray-project/kuberay/ray-operator@v1.6.2",
    "coredns": "github.com/coredns/coredns@v1.12.4",
    "kwok": "sigs.k8s.io/kwok/cmd/kwok@v0.8.0",
}


def require_prerequisites() -> None:
    """Raises `DeviceError` with everything that is missing, and what to install."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise DeviceError("the cluster needs root on Linux: it starts a kubelet, containerd and network bridges.")
    packages = {each for name, named in PREREQUISITES.items() if shutil.which(name) is None for each in named.split()}
    advice = [f"apt-get install --yes {' '.join(sorted(packages))}"] if packages else []
    if shutil.which("go") is None:
        advice.append("Go 1.25 or newer on PATH: from https://go.dev/dl, which installs to /usr/local/go/bin")
    if advice:
        raise DeviceError("\n  ".join(["the cluster needs what this machine lacks:", *advice]))
    require_engine()


def module_dir(module: str) -> Path:
    """The sources of a module: of the version in go.mod, or of MODULE@VERSION."""
    command = ("go", "mod", "download", "-json", module) if "@" in module else ("go", "list", "-m", "-json", module)
    return Path(json.loads(run(*command, cwd=HERE))["Dir"])


def write_module_file() -> Path:
    """A copy of go.mod in which volcano.sh/apis has the one constant that Volcano 1.15.0 takes from its v1.15.0."""
    apis = HOME / "volcano-apis"
    shutil.rmtree(apis, ignore_errors=True)
    shutil.copytree(module_dir("volcano.sh/apis"), apis, copy_function=shutil.copyfile)
    constant = 'package v1beta1\n\nconst QueueAllocationGateKey = GroupName + "/queue-allocation-gate"\n'
    (apis / "pkg/apis/scheduling/v1beta1/queue_allocation_gate.go").write_text(constant)
    for name in ("go.mod", "go.sum"):
        shutil.copyfile(HERE / name, HOME / name)
    run("go", "mod", "edit", f"-replace=volcano.sh/apis={apis}", HOME / "go.mod")
    return HOME / "go.mod"


def build() -> None:
    """Compile the binaries: 9 minutes from nothing on 2 cores, then Go's cache has them."""
    BIN.mkdir(parents=True, exist_ok=True)
    version = "k8s.io/component-base/version"
    minor = KUBERNETES.split(".")[1]
    flags = f"-s -w -X {version}.gitVersion={KUBERNETES} -X {version}.gitMajor=1 -X {version}.gitMinor={minor}"
    modules = f"-modfile={write_module_file()}"
    commands: dict[str, tuple[list[str | Path], dict[str, Any]]] = {
        name: (["go", "build", modules, "-trimpath", "-ldflags", flags, "-o", BIN / name, package], {"cwd": HERE})
        for name, package in PACKAGES.items()
    }
    own = {"env": {**os.environ, "GOBIN": str(BIN)}}
    commands |= {name: (["go", "install", "-ldflags", "-s -w", package], own) for name, package in TOOLS.items()}
    print(
        f"compiling {len(commands)} programs of Kubernetes, Volcano and KubeRay from their sources, once: 9 minutes on "
        f"2 cores, 20 where they are shared or the sources have to be downloaded",
        flush=True,
    )
    for number, (name, (command, options)) in enumerate(commands.items(), start=1):
        print(f"{number:2d} of {len(commands)}  {name} ...", flush=True)
        run(*command, **options)


def make_certificates() -> str:
    if not (PKI / "api.crt").exists():
        names = "kubernetes kubernetes.default kubernetes.default.svc kubernetes.default.svc.cluster.local localhost"
        san = ",".join([f"DNS:{n}" for n in names.split()] + [f"IP:{a}" for a in ("127.0.0.1", ADDRESS, "10.96.0.1")])
        run("openssl", "genrsa", "-out", PKI / "sa.key", "2048")
        run("openssl", "rsa", "-in", PKI / "sa.key", "-pubout", "-out", PKI / "sa.pub")
        run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=test-ca",
            "-keyout", PKI / "ca.key", "-out", PKI / "ca.crt")  # fmt: skip
        run("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=kube-apiserver",
            "-keyout", PKI / "api.key", "-out", PKI / "api.csr")  # fmt: skip
        (PKI / "san").write_text(f"subjectAltName={san}")
        run("openssl", "x509", "-req", "-in", PKI / "api.csr", "-CA", PKI / "ca.crt", "-CAkey", PKI / "ca.key",
            "-CAcreateserial", "-days", "30", "-extfile", PKI / "san", "-out", PKI / "api.crt")  # fmt: skip
        (PKI / "tokens.csv").write_text(f"{secrets.token_hex(16)},admin,admin,system:masters\n")
    return (PKI / "tokens.csv").read_text().split(",")[0]


def write_configuration(token: str) -> None:
    KUBECONFIG.touch(mode=0o600)
    KUBECONFIG.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"https://{ADDRESS}:6443",
                                                  "certificate-authority": str(PKI / "ca.crt")}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
    }, indent=1))  # fmt: skip
    (HOME / "cni").mkdir(exist_ok=True)
    (HOME / "cni" / "10-bridge.conflist").write_text(json.dumps({
        "cniVersion": "1.0.0", "name": "test",
        "plugins": [
            {"type": "bridge", "bridge": "mrpods0", "isGateway": True, "ipMasq": True, "hairpinMode": True,
             "ipam": {"type": "host-local", "dataDir": str(HOME / "ipam"), "ranges": [[{"subnet": POD_RANGE}]],
                      "routes": [{"dst": "0.0.0.0/0"}]}},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }))  # fmt: skip
    # restrict_oom_score_adj: without CAP_SYS_RESOURCE runc cannot lower it and dies with
    # "can't get final child's PID from pipe: EOF".
    (HOME / "containerd.toml").write_text(f"""version = 2
root = "{HOME}/containerd/root"
state = "{HOME}/containerd/state"
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "millrace.test/pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{HOME}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
""")
    (HOME / "kubelet.yaml").write_text(json.dumps({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"}, "address": ADDRESS, "healthzBindAddress": "127.0.0.1",
        "cgroupDriver": "cgroupfs", "failCgroupV1": False, "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{SOCKET}", "clusterDNS": [DNS_ADDRESS], "clusterDomain": "cluster.local",
        "imageGCHighThresholdPercent": 100,
        # Not 1%: while images are loaded a disk may be nearly full, and kubelet would remove the sandboxes' own image.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "10Mi", "imagefs.available": "10Mi"},
        "nodeStatusMaxImages": -1,
    }))  # fmt: skip
    (HOME / "Corefile").write_text(f"""cluster.local:53 in-addr.arpa:53 {{
  bind {DNS_ADDRESS}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {KUBECONFIG} test
  }}
}}
""")


def make_network() -> None:
    if not Path("/sys/class/net/mrcontrol0").exists():
        run("ip", "link", "add", "mrcontrol0", "type", "bridge")
        for address in (ADDRESS, DNS_ADDRESS):
            run("ip", "address", "add", f"{address}/32", "dev", "mrcontrol0")
        run("ip", "link", "set", "mrcontrol0", "up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    run("iptables", "-P", "FORWARD", "ACCEPT")  # Docker's engine sets DROP, which cuts pods off from services


def make_artifacts_folder() -> None:
    if not ARTIFACTS.exists():
        ARTIFACTS.mkdir(parents=True)
        os.chown(ARTIFACTS, USER, USER)


def start_control_plane() -> None:
    start("etcd", BIN / "etcd", "--data-dir", HOME / "etcd", "--unsafe-no-fsync",
          "--listen-client-urls=http://127.0.0.1:23790", "--advertise-client-urls=http://127.0.0.1:23790",
          "--listen-peer-urls=http://127.0.0.1:23800")  # fmt: skip
    start("kube-apiserver", BIN / "kube-apiserver", "--etcd-servers=http://127.0.0.1:23790",
          "--bind-address=0.0.0.0", f"--advertise-address={ADDRESS}", "--secure-port=6443",
          f"--tls-cert-file={PKI}/api.crt", f"--tls-private-key-file={PKI}/api.key",
          f"--service-cluster-ip-range={SERVICE_RANGE}", "--service-account-issuer=https://kubernetes.default.svc",
          f"--service-account-key-file={PKI}/sa.pub", f"--service-account-signing-key-file={PKI}/sa.key",
          f"--token-auth-file={PKI}/tokens.csv", "--authorization-mode=Node,RBAC", "--allow-privileged=true",
          "--kubelet-preferred-address-types=InternalIP")  # fmt: skip
    wait("kube-apiserver", lambda: "ok" in kubectl("get", "--raw", "/readyz", quiet=True))
    start("kube-controller-manager", BIN / "kube-controller-manager", f"--kubeconfig={KUBECONFIG}",
          f"--service-account-private-key-file={PKI}/sa.key", f"--root-ca-file={PKI}/ca.crt",
          "--leader-elect=false", "--bind-address=127.0.0.1")  # fmt: skip
    start("kube-scheduler", BIN / "kube-scheduler", f"--kubeconfig={KUBECONFIG}", "--leader-elect=false",
          "--bind-address=127.0.0.1")  # fmt: skip


def start_node() -> None:
    start("containerd", "containerd", "-c", HOME / "containerd.toml")
    wait("containerd", lambda: "Server" in run("ctr", "-a", SOCKET, "version", quiet=True))
    load_pause_image()
    start("kubelet", BIN / "kubelet", f"--config={HOME}/kubelet.yaml", f"--kubeconfig={KUBECONFIG}",
          f"--root-dir={HOME}/kubelet", f"--cert-dir={HOME}/kubelet/pki", "--hostname-override=node-a",
          f"--node-ip={ADDRESS}")  # fmt: skip
    start("kube-proxy", BIN / "kube-proxy", f"--kubeconfig={KUBECONFIG}", "--proxy-mode=iptables",
          "--hostname-override=node-a", f"--cluster-cidr={POD_RANGE}", "--conntrack-max-per-core=0",
          "--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=127.0.0.1:10249")  # fmt: skip
    start("coredns", BIN / "coredns", "-conf", HOME / "Corefile")
    ready = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    wait("node-a", lambda: kubectl("get", "node", "node-a", "-o", ready, quiet=True) == "True")
    resources = {"aws.amazon.com/neuron": "64", "vpc.amazonaws.com/efa": "32"}
    patch = [
        {"op": "add", "path": f"/status/capacity/{name.replace('/', '~1')}", "value": amount}
        for name, amount in resources.items()
    ]
    kubectl("patch", "node", "node-a", "--subresource=status", "--type=json", "-p", json.dumps(patch))


def load_pause_image() -> None:
    """Every pod sandbox needs a process that waits: one C file, linked statically."""
    folder = HOME / "pause"
    folder.mkdir(exist_ok=True)
    (folder / "pause.c").write_text(
        "#include <signal.h>\n#include <unistd.h>\n"
        "static void leave(int s) { (void)s; _exit(0); }\n"
        "int main(void) { signal(SIGTERM, leave); signal(SIGINT, leave); for (;;) pause(); }\n"
    )
    run("gcc", "-static", "-Os", "-o", folder / "pause", folder / "pause.c")
    (folder / "Dockerfile").write_text('FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n')
    run("docker", "build", "-q", "-t", "millrace.test/pause:1", folder)
    load("millrace.test/pause:1")


def start_operators() -> None:
    """KubeRay without its own batch-scheduler integration: with it a RayJob that uses
    clusterSelector never leaves Initializing (seen with KubeRay 1.6.1)."""
    kuberay, volcano = module_dir(TOOLS["ray-operator"]), module_dir("volcano.sh/volcano")
    chart = volcano / "installer/helm/chart/volcano"
    for folder in (kuberay / "config/crd/bases", chart / "crd/bases"):
        kubectl("apply", "--server-side", "-f", folder)
    established = ("get", "crd", "-o", 'jsonpath={.items[*].status.conditions[?(@.type=="Established")].status}')
    names = ("get", "crd", "-o", "name")
    wait("the CRDs", lambda: kubectl(*established, quiet=True).split().count("True") == len(kubectl(*names).split()))
    kubectl("create", "namespace", "volcano-system", quiet=True)
    shutil.copyfile(chart / "config/volcano-scheduler.conf", HOME / "volcano-scheduler.conf")
    start("volcano-scheduler", BIN / "volcano-scheduler", f"--kubeconfig={KUBECONFIG}", "--leader-elect=false",
          f"--scheduler-conf={HOME}/volcano-scheduler.conf", "--logtostderr", "-v=3")  # fmt: skip
    start("volcano-controller", BIN / "volcano-controller", f"--kubeconfig={KUBECONFIG}", "--leader-elect=false",
          "--controllers=pg-controller,queue-controller,gc-controller", "--logtostderr")  # fmt: skip
    start_kuberay()
    queues = ("get", "queues.scheduling.volcano.sh", "default", "-o", "name")
    wait("Volcano's default queue", lambda: bool(kubectl(*queues, quiet=True)))


def start_kuberay(*flags: str, name: str = KUBERAY, first_port: int = 18080) -> None:
    """Start a KubeRay operator of this name, which takes two ports from `first_port` on."""
    start(name, BIN / "ray-operator", f"-kubeconfig={KUBECONFIG}", "-enable-leader-election=false",
          "-use-kubernetes-proxy", f"-metrics-addr=127.0.0.1:{first_port}",
          f"-health-probe-bind-address=127.0.0.1:{first_port + 1}", *flags)  # fmt: skip


def is_up() -> bool:
    return KUBECONFIG.exists() and "ok" in kubectl("get", "--raw", "/readyz", "--request-timeout=2s", quiet=True)


def up() -> None:
    """Start everything and return when the node is Ready. One that is up stays as it is; half of one is replaced.

    What ends it early, also Ctrl-C, takes down what was started.
    """
    require_prerequisites()
    if is_up():
        return
    if any(not (BIN / name).exists() for name in (*PACKAGES, *TOOLS)):
        build()
    down()
    for folder in (LOG, PKI, PID):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        write_configuration(make_certificates())
        make_network()
        make_artifacts_folder()
        start_control_plane()
        start_node()
        start_operators()
    except BaseException:
        down()
        raise


@contextmanager
def unstoppable() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP wait until the end, also for the commands that are run here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@unstoppable()
def down() -> None:
    """Stop everything and remove what `up` made; the binaries, the logs and the artifacts stay."""
    if not HOME.exists():
        return
    # Controllers first: they would start again what is stopped after them.
    operators = (KUBERAY, "volcano-controller", "volcano-scheduler")
    for name in (*operators, "kube-controller-manager", "kwok", "kubelet", "kube-proxy"):
        stop(name)
    for task in ctr("tasks", "ls", "-q", quiet=True).split():
        ctr("tasks", "rm", "-f", task, quiet=True)
    run(BIN / "kube-proxy", "--cleanup", quiet=True)
    for file in sorted(PID.glob("*")):
        stop(file.name)
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((m for m in mounts if m.startswith(f"{HOME}/")), reverse=True):
        run("umount", "-l", mount, quiet=True)
    for link in ("mrcontrol0", "mrpods0"):
        run("ip", "link", "delete", link, quiet=True)
    for name in ("etcd", "kubelet", "containerd", "ipam", "pki", "pid", "pause"):
        shutil.rmtree(HOME / name, ignore_errors=True)
    KUBECONFIG.unlink(missing_ok=True)
