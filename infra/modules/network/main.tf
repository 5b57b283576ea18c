# One VPC. Every node, the file system and the NAT gateway are in one zone, because EFA, a placement group and a Capacity
# Block do not cross zones, and traffic between zones is billed. A second zone has addresses for EKS' control plane only.

locals {
  cidrs = {
    trainium = cidrsubnet(var.cidr, 3, 0) # an eighth of the VPC, because a node takes an address per interface and pod
    nodes    = cidrsubnet(var.cidr, 4, 2)
    second   = cidrsubnet(var.cidr, 4, 3)
    public   = cidrsubnet(var.cidr, 4, 4)
  }

  # APIs that nodes and stages of both targets call. S3 has a gateway endpoint instead, which is free.
  interface_endpoints = var.enable_interface_endpoints ? setunion(
    ["ec2", "ecr.api", "ecr.dkr", "fsx", "kms", "logs", "sts"], var.endpoints_of_target,
  ) : toset([])
}

resource "aws_vpc" "this" {
  cidr_block           = var.cidr
  enable_dns_hostnames = true # FSx and private endpoints are addressed by name
  enable_dns_support   = true
  tags                 = { Name = var.name }
}

# The VPC's default group admits no traffic, unless uses_default_group says that containers may be in it: according to one AWS
# page, those of Batch's jobs on Trainium nodes are (modules/batch). Then they reach one another and AWS' APIs.
resource "aws_default_security_group" "this" {
  vpc_id = aws_vpc.this.id

  dynamic "ingress" {
    for_each = var.uses_default_group ? ["All traffic from itself"] : []
    content {
      description = ingress.value
      self        = true
      protocol    = "-1"
      from_port   = 0
      to_port     = 0
    }
  }

  dynamic "egress" {
    for_each = var.uses_default_group ? ["All traffic to itself"] : []
    content {
      description = egress.value
      self        = true
      protocol    = "-1"
      from_port   = 0
      to_port     = 0
    }
  }

  dynamic "egress" {
    for_each = var.uses_default_group ? ["AWS APIs, packages and texts"] : []
    content {
      description = egress.value
      cidr_blocks = ["0.0.0.0/0"]
      protocol    = "tcp"
      from_port   = 443
      to_port     = 443
    }
  }
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = var.name }
}

resource "aws_subnet" "public" {
  vpc_id               = aws_vpc.this.id
  cidr_block           = local.cidrs.public
  availability_zone_id = var.zone_ids[0]
  tags                 = { Name = "${var.name}-public" }
}

# Only for EFA interfaces and the file system. It is private, because nodes with several interfaces get no public address.
resource "aws_subnet" "trainium" {
  vpc_id               = aws_vpc.this.id
  cidr_block           = local.cidrs.trainium
  availability_zone_id = var.zone_ids[0]
  tags                 = { Name = "${var.name}-trainium" }
}

resource "aws_subnet" "nodes" {
  vpc_id               = aws_vpc.this.id
  cidr_block           = local.cidrs.nodes
  availability_zone_id = var.zone_ids[0]
  tags                 = { Name = "${var.name}-nodes" }
}

resource "aws_subnet" "second" {
  vpc_id               = aws_vpc.this.id
  cidr_block           = local.cidrs.second
  availability_zone_id = var.zone_ids[1]
  tags                 = { Name = "${var.name}-second-zone" }
}

resource "aws_eip" "nat" {
  domain     = "vpc"
  tags       = { Name = "${var.name}-nat" }
  depends_on = [aws_internet_gateway.this]
}

resource "aws_nat_gateway" "this" {
  allocation_id = aws_eip.nat.id
  subnet_id     = aws_subnet.public.id
  tags          = { Name = var.name }
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-public" }
}

resource "aws_route" "internet" {
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "public" {
  subnet_id      = aws_subnet.public.id
  route_table_id = aws_route_table.public.id
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-private" }
}

resource "aws_route" "nat" {
  route_table_id         = aws_route_table.private.id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this.id
}

resource "aws_route_table_association" "private" {
  for_each = {
    trainium = aws_subnet.trainium.id
    nodes    = aws_subnet.nodes.id
    second   = aws_subnet.second.id
  }
  subnet_id      = each.value
  route_table_id = aws_route_table.private.id
}

resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.private.id]
  tags              = { Name = "${var.name}-s3" }
}

resource "aws_security_group" "endpoints" {
  count       = var.enable_interface_endpoints ? 1 : 0
  name        = "${var.name}-endpoints"
  description = "HTTPS from inside of the VPC to the endpoints of AWS APIs"
  vpc_id      = aws_vpc.this.id
  tags        = { Name = "${var.name}-endpoints" }
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  count             = var.enable_interface_endpoints ? 1 : 0
  security_group_id = aws_security_group.endpoints[0].id
  description       = "HTTPS from the VPC"
  cidr_ipv4         = var.cidr
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_vpc_endpoint" "interface" {
  for_each            = local.interface_endpoints
  vpc_id              = aws_vpc.this.id
  service_name        = "com.amazonaws.${var.region}.${each.value}"
  vpc_endpoint_type   = "Interface"
  subnet_ids          = [aws_subnet.nodes.id] # the zone of all nodes
  security_group_ids  = [aws_security_group.endpoints[0].id]
  private_dns_enabled = true
  tags                = { Name = "${var.name}-${each.value}" }
}

module "security_groups" {
  source = "../security-groups"
  name   = var.name
  vpc_id = aws_vpc.this.id
}

# Only rejected traffic is recorded: it is little, and it is what people look for. Accepted traffic would cost far more.
resource "aws_flow_log" "refused" {
  count           = var.flow_log == null ? 0 : 1
  vpc_id          = aws_vpc.this.id
  traffic_type    = "REJECT"
  log_destination = var.flow_log.log_group_arn
  iam_role_arn    = aws_iam_role.flow_log[0].arn
  tags            = { Name = var.name }
}

resource "aws_iam_role" "flow_log" {
  count                = var.flow_log == null ? 0 : 1
  name                 = "${var.name}-${var.region}-flow-log"
  description          = "Writes the VPC's flow log"
  permissions_boundary = var.permissions_boundary
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "vpc-flow-logs.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "flow_log" {
  count = var.flow_log == null ? 0 : 1
  name  = "write"
  role  = aws_iam_role.flow_log[0].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect   = "Allow"
      Action   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogGroups", "logs:DescribeLogStreams"]
      Resource = ["${var.flow_log.log_group_arn}:*"]
    }]
  })
}
