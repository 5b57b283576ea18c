output "vpc_id" {
  value = aws_vpc.this.id
}

output "trainium_subnet" {
  value = { id = aws_subnet.trainium.id, zone_id = var.zone_ids[0], cidr = local.cidrs.trainium }
}

output "nodes_subnet_id" {
  value = aws_subnet.nodes.id
}

output "control_plane_subnet_ids" {
  description = "Ids of the control plane's subnets, in two zones."
  value       = [aws_subnet.nodes.id, aws_subnet.second.id]
}

output "efa_security_group_id" {
  value = module.security_groups.efa_id
}

output "fsx_security_group_id" {
  value = module.security_groups.fsx_id
}

# Nodes wait for the routes, without which a private subnet reaches nothing.
output "routes" {
  value = { nat = aws_route.nat.id, associations = [for each in aws_route_table_association.private : each.id] }
}
