# `make infra-up` writes those that k8s/overlays/eks needs into its settings.env.

output "region" {
  value = var.region
}

output "cluster_name" {
  value = module.eks.cluster.name
}

output "namespace" {
  value = local.namespace
}

output "zone_id" {
  value = var.zone_id
}

output "registry" {
  value = "${local.account.id}.dkr.ecr.${var.region}.${data.aws_partition.current.dns_suffix}"
}

output "repositories" {
  value = module.registry.repositories
}

output "fsx_id" {
  value = var.enable_fsx ? module.storage.fsx.id : ""
}

output "fsx_dns_name" {
  value = var.enable_fsx ? module.storage.fsx.dns_name : ""
}

output "fsx_mount_name" {
  value = var.enable_fsx ? module.storage.fsx.mount_name : ""
}

output "fsx_gib" {
  value = local.fsx.gib
}

output "trainium_shape" {
  value = var.trainium.shape
}

output "trainium_node_group" {
  value = module.trainium.node_group
}

output "trainium_max_nodes" {
  value = var.trainium.max_nodes
}

output "addresses_per_node" {
  description = "Number of addresses that a node takes in the Trainium subnet."
  value       = local.addresses_per_node
}

output "cpu_shape" {
  value = var.cpu_nodes.shape
}

output "cpu_node_group" {
  value = module.eks.node_groups[local.node_groups.cpu]
}

output "cpu_max_nodes" {
  value = var.cpu_nodes.max_nodes
}

output "capacity_ends_at" {
  value = var.capacity.ends_at
}

output "bucket" {
  value = module.storage.bucket.name
}

output "pod_identities" {
  description = "ARNs of the roles by service account of the namespace."
  value       = module.eks.pod_identities
}

output "node_labels" {
  description = "Kubernetes labels of the nodes by pool."
  value       = local.node_labels
}

output "node_taints" {
  description = "Taints of the nodes by pool, with the effect as Kubernetes spells it."
  value       = local.node_taints
}
