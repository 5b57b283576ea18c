output "node_group" {
  value = aws_eks_node_group.this.node_group_name
}

output "autoscaling_group" {
  value = one(flatten(aws_eks_node_group.this.resources[*].autoscaling_groups[*].name))
}

output "user_data" {
  description = "User data of the nodes."
  value       = local.user_data
}

output "shape" {
  description = "Instance type in the launch template."
  value       = aws_launch_template.this.instance_type
}

output "node_labels" {
  value = aws_eks_node_group.this.labels
}

output "node_taints" {
  description = "Taints, as EKS spells them."
  value       = [for each in aws_eks_node_group.this.taint : { key = each.key, value = each.value, effect = each.effect }]
}

output "ami_release" {
  value = aws_eks_node_group.this.release_version
}
