"""infra-down on a cluster or in a network that others use, too: it names what they have, and destroys nothing of it."""

from __future__ import annotations

import pytest

from infra.account.session import STACK_TAG
from infra.tests.conftest import Aws, RunInfra
from infra.tests.site import ADDONS, Site, thing


@pytest.fixture
def shared(run_infra: RunInfra, cluster: Site, aws: Aws) -> Site:
    """The cluster is up, and a team called research works on it, too."""
    cluster.put(
        "namespaces", *(thing("Namespace", name) for name in ("default", "kube-system", "millrace", "research"))
    )
    cluster.put("pods", *(thing("Pod", name, "research") for name in ("notebook", "other")))
    cluster.put(
        "services",
        thing("Service", "shown", "millrace", type="LoadBalancer"),
        thing("Service", "notebook", "research", type="LoadBalancer"),
    )
    cluster.put(
        "persistentvolumeclaims",
        thing("PersistentVolumeClaim", "scratch", "millrace", storageClassName="gp3"),
        thing("PersistentVolumeClaim", "notes", "research"),
    )
    cluster.install(("karpenter", "kube-system", "karpenter-1.8.1"), ("tools", "research", "tools-1.0.0"), ours=ADDONS)
    group = aws.client("eks").describe_nodegroup(clusterName="millrace", nodegroupName="trainium")["nodegroup"]
    aws.make_node_group("research", group["subnets"], size=3, is_ours=False)
    run_infra("up")
    cluster.programs.forget_calls()
    return cluster


def network_of(aws: Aws) -> str:
    [vpc] = aws.client("ec2").describe_vpcs(Filters=[{"Name": f"tag:{STACK_TAG}", "Values": ["millrace"]}])["Vpcs"]
    return str(vpc["VpcId"])


def changes(site: Site) -> list[str]:
    """The changes that kubectl and helm were told to make."""
    words = (" delete ", "helm uninstall ", "helm upgrade ", " apply ")
    return [line for line in site.programs.calls if any(word in line for word in words)]


def test_it_is_refused_before_anything_is_taken_down(run_infra: RunInfra, shared: Site, aws: Aws) -> None:
    sizes, addresses = aws.node_group_sizes(), shared.addresses

    done = run_infra("down", exit_code=4)

    assert "Take down" not in done.stdout
    named = {
        "namespace": "kubectl delete namespace research",
        "helm release": "helm --namespace kube-system uninstall karpenter",
        "node group": "aws eks delete-nodegroup --cluster-name millrace --nodegroup-name research",
        "service": "kubectl --namespace research delete service notebook",
        "persistentvolumeclaim": "kubectl --namespace research delete persistentvolumeclaim notes",
    }
    for kind, removal in named.items():
        assert kind in done.stderr
        assert removal in done.stderr
    assert done.stderr.count(" delete ") + done.stderr.count(" uninstall ") + done.stderr.count(" delete-") == len(
        named
    )
    assert "2 pods, helm releases tools" in done.stderr
    assert (aws.node_group_sizes(), shared.addresses, changes(shared)) == (sizes, addresses, [])


@pytest.mark.slow
def test_an_addon_that_somebody_else_installed_stays(run_infra: RunInfra, cluster: Site) -> None:
    """The release has the same name and namespace as one of make addons."""
    theirs, *ours = ADDONS
    cluster.install(theirs, ours=tuple(ours))
    run_infra("up")
    cluster.programs.forget_calls()

    done = run_infra("down", exit_code=4)

    assert "helm --namespace kuberay-system uninstall kuberay" in done.stderr
    assert changes(cluster) == []


def test_what_others_have_in_the_network_stays_with_it_and_is_in_the_way_without(
    run_infra: RunInfra, cluster: Site, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    ec2, vpc = aws.client("ec2"), network_of(aws)
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.9.0/24")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(VpcId=vpc, GroupName="research", Description="any")["GroupId"]
    endpoint = ec2.create_vpc_endpoint(
        VpcId=vpc, ServiceName="com.amazonaws.us-west-2.guardduty-data", VpcEndpointType="Interface", SubnetIds=[subnet]
    )["VpcEndpoint"]["VpcEndpointId"]
    elbv2 = aws.client("elbv2")
    balancer = elbv2.create_load_balancer(Name="research", Subnets=[subnet], Type="network")["LoadBalancers"][0]
    of_cluster = [{"Key": "elbv2.k8s.aws/cluster", "Value": "millrace"}]
    elbv2.create_load_balancer(Name="of-a-service", Subnets=[subnet], Type="network", Tags=of_cluster)
    aws.client("elb").create_load_balancer(
        LoadBalancerName="classic",
        Listeners=[{"Protocol": "TCP", "LoadBalancerPort": 80, "InstancePort": 80}],
        Subnets=[subnet],
        SecurityGroups=[group],
    )
    instance = aws.run_instance("m7i.large", SubnetId=subnet)
    elsewhere = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    ec2.create_subnet(VpcId=elsewhere, CidrBlock="10.1.0.0/24")
    found = (subnet, group, endpoint, balancer["LoadBalancerArn"], "classic", instance)
    run_infra("up")

    monkeypatch.setenv("KEEP_DATA", "false")
    refused = run_infra("down", exit_code=4)
    monkeypatch.delenv("KEEP_DATA")
    done = run_infra("down")

    assert "6 resources beside millrace" in refused.stderr
    assert "without KEEP_DATA=false leaves them" in refused.stderr
    assert "Take down" not in refused.stdout
    asked = done.stdout.partition("Take down")[0]
    for name in found:
        assert name in refused.stderr
        assert name in asked


@pytest.mark.slow
def test_a_node_that_karpenter_made_would_outlive_the_cluster(run_infra: RunInfra, cluster: Site, aws: Aws) -> None:
    ec2 = aws.client("ec2")
    [subnet] = ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [network_of(aws)]}])["Subnets"]
    owned = {"kubernetes.io/cluster/millrace": "owned"}
    instance = aws.run_instance("m7i.large", owned, SubnetId=subnet["SubnetId"])
    run_infra("up")

    done = run_infra("down", exit_code=4)

    assert f"aws ec2 terminate-instances --instance-ids {instance}" in done.stderr
