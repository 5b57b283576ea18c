locals {
  lustre_ports = { lustre = [988, 988], lustre_peers = [1018, 1023] }
}

# EFA is not IP: only rules for all traffic from and to the group itself admit it, and both are needed.
resource "aws_security_group" "efa" {
  name        = "${var.name}-efa"
  description = "EFA between Trainium nodes"
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name}-efa" }
}

resource "aws_vpc_security_group_ingress_rule" "efa" {
  security_group_id            = aws_security_group.efa.id
  description                  = "All traffic from itself"
  referenced_security_group_id = aws_security_group.efa.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "efa" {
  security_group_id            = aws_security_group.efa.id
  description                  = "All traffic to itself"
  referenced_security_group_id = aws_security_group.efa.id
  ip_protocol                  = "-1"
}

# One group for the file system's servers and all nodes that mount it, so that rules from and to the group itself cover all
# directions: client to server, server to client and server to server.
resource "aws_security_group" "fsx" {
  name        = "${var.name}-fsx"
  description = "Lustre between the file system and the nodes"
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name}-fsx" }
}

resource "aws_vpc_security_group_ingress_rule" "fsx" {
  for_each                     = local.lustre_ports
  security_group_id            = aws_security_group.fsx.id
  description                  = "Lustre from itself"
  referenced_security_group_id = aws_security_group.fsx.id
  ip_protocol                  = "tcp"
  from_port                    = each.value[0]
  to_port                      = each.value[1]
}

resource "aws_vpc_security_group_egress_rule" "fsx" {
  for_each                     = local.lustre_ports
  security_group_id            = aws_security_group.fsx.id
  description                  = "Lustre to itself"
  referenced_security_group_id = aws_security_group.fsx.id
  ip_protocol                  = "tcp"
  from_port                    = each.value[0]
  to_port                      = each.value[1]
}
