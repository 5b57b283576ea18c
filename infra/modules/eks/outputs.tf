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

# Node groups of other modules wait for this, like those here.
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
  description = "Roles of service accounts, with name and ARN."
  value       = { for account, role in aws_iam_role.pod : account => { name = role.name, arn = role.arn } }
}

output "node_labels" {
  description = "Kubernetes labels by node group."
  value       = { for name, group in aws_eks_node_group.pool : name => group.labels }
}

output "shapes" {
  description = "Instance types in the launch templates, by node group."
  value       = { for name, template in aws_launch_template.pool : name => template.instance_type }
}

output "volume_gib" {
  description = "Sizes of the nodes' root volumes in GiB, by node group."
  value       = { for name, template in aws_launch_template.pool : name => template.block_device_mappings[0].ebs[0].volume_size }
}

output "pod_identity_namespaces" {
  value = distinct([for each in aws_eks_pod_identity_association.pod : each.namespace])
}

output "ami_releases" {
  description = "AMI releases by node group."
  value       = { for name, group in aws_eks_node_group.pool : name => group.release_version }
}

output "administrators" {
  description = "ARNs of the principals that administer the cluster."
  value       = concat([aws_eks_access_entry.creator.principal_arn], [for each in aws_eks_access_entry.administrator : each.principal_arn])
}

output "addon_versions" {
  description = "Pinned versions by add-on; null for EKS' default."
  value       = { for name, addon in merge(aws_eks_addon.before_nodes, aws_eks_addon.after_nodes) : name => addon.addon_version }
}
