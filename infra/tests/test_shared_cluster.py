"""infra-down on a cluster or in a network that others use, too: it names what they have, and destroys nothing of it."""

from __future__ import annotations

import pytest

from infra.account.session import STACK_TAG
from infra.tests.conftest import Aws, RunInfra
from infra.tests.site import ADDONS, Site, thing


def network_of(aws: Aws) -> str:
    [vpc] = aws.client("ec2").describe_vpcs(Filters=[{"Name": f"tag:{STACK_TAG}", "Values": ["millrace"]}])["Vpcs"]
    return str(vpc["VpcId"])


def test_it_is_refused_before_anything_is_taken_down(run_infra: RunInfra, cluster: Site, aws: Aws) -> None:
    """A team called research works on the cluster, too."""
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
    theirs, *ours = ADDONS  # of the same name and namespace as one of make addons
    others = (theirs, ("karpenter", "kube-system", "karpenter-1.8.1"), ("tools", "research", "tools-1.0.0"))
    cluster.install(*others, ours=tuple(ours))
    group = aws.client("eks").describe_nodegroup(clusterName="millrace", nodegroupName="trainium")["nodegroup"]
    aws.make_node_group("research", group["subnets"], size=3, is_ours=False)
    run_infra("up")
    cluster.programs.forget_calls()
    [subnet] = aws.client("ec2").describe_subnets(Filters=[{"Name": "vpc-id", "Values": [network_of(aws)]}])["Subnets"]
    owned = {"kubernetes.io/cluster/millrace": "owned"}  # as Karpenter makes one, which would outlive the cluster
    instance = aws.run_instance("m7i.large", owned, SubnetId=subnet["SubnetId"])
    sizes, addresses = aws.node_group_sizes(), cluster.addresses

    done = run_infra("down", exit_code=4)

    assert "Take down" not in done.stdout
    removals = (
        "kubectl delete namespace research",
        "helm --namespace kuberay-system uninstall kuberay",
        "helm --namespace kube-system uninstall karpenter",
        "aws eks delete-nodegroup --cluster-name millrace --nodegroup-name research",
        f"aws ec2 terminate-instances --instance-ids {instance}",
        "kubectl --namespace research delete service notebook",
        "kubectl --namespace research delete persistentvolumeclaim notes",
    )
    assert [each for each in removals if each not in done.stderr] == []
    named = sum(done.stderr.count(word) for word in (" delete ", " uninstall ", " delete-", " terminate-"))
    assert named == len(removals), "nothing else is named"
    assert "2 pods, helm releases tools" in done.stderr
    assert (aws.node_group_sizes(), cluster.addresses) == (sizes, addresses)
    words = (" delete ", "helm uninstall ", "helm upgrade ", " apply ")
    assert [line for line in cluster.programs.calls if any(word in line for word in words)] == []


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

    assert "Take down" not in refused.stdout
    asked = done.stdout.partition("Take down")[0]
    for name in found:
        assert name in refused.stderr
        assert name in asked
