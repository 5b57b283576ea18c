output "cluster" {
  value = {
    name              = aws_eks_cluster.this.name
    version           = aws_eks_cluster.this.version
    security_group_id = aws_eks_cluster.this.vpc_config[0].cluster_security_group_id
  }
}

output "node_role_arn" {
  value = aws_iam_role.node.arn
}

# Another pool waits for it as the pools here do.
output "ready_for_nodes" {
  value = {
    policies = [for each in aws_iam_role_policy_attachment.node : each.id]
    addons   = [for each in aws_eks_addon.before_nodes : each.id]
    routes   = terraform_data.routes.id
  }
}

output "node_groups" {
  value = { for name, group in aws_eks_node_group.pool : name => group.node_group_name }
}

output "pod_identities" {
  value = { for account, role in aws_iam_role.pod : account => role.arn }
}

output "pod_roles" {
  description = "The same with their names."
  value       = { for account, role in aws_iam_role.pod : account => { name = role.name, arn = role.arn } }
}

output "node_labels" {
  description = "By node group, as it has them."
  value       = { for name, group in aws_eks_node_group.pool : name => group.labels }
}

output "shapes" {
  description = "Instance types by node group, as its launch template has them."
  value       = { for name, template in aws_launch_template.pool : name => template.instance_type }
}

output "volume_gib" {
  description = "Of a node's root volume, by node group."
  value       = { for name, template in aws_launch_template.pool : name => template.block_device_mappings[0].ebs[0].volume_size }
}

output "pod_identity_namespaces" {
  value = distinct([for each in aws_eks_pod_identity_association.pod : each.namespace])
}

output "ami_releases" {
  description = "By node group."
  value       = { for name, group in aws_eks_node_group.pool : name => group.release_version }
}

output "administrators" {
  description = "ARNs of all who administer the cluster."
  value       = concat([aws_eks_access_entry.creator.principal_arn], [for each in aws_eks_access_entry.administrator : each.principal_arn])
}

output "addon_versions" {
  description = "Pins by add-on; null: EKS' default."
  value       = { for name, addon in merge(aws_eks_addon.before_nodes, aws_eks_addon.after_nodes) : name => addon.addon_version }
}
