# Role of every node. Pods cannot use it, because of the launch templates' hop limit, and have roles of their own.
resource "aws_iam_role" "node" {
  name                 = "${var.name}-${var.account.region}-node"
  description          = "Nodes: join the cluster, pull images, Session Manager instead of SSH"
  permissions_boundary = var.permissions_boundary
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "node" {
  for_each = toset(concat(
    ["AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly", "AmazonSSMManagedInstanceCore"],
    # Without Pod Identity the CNI uses its node's rights.
    var.enable_addons ? [] : ["AmazonEKS_CNI_Policy"],
  ))
  role       = aws_iam_role.node.name
  policy_arn = "arn:${var.account.partition}:iam::aws:policy/${each.value}"
}

resource "aws_launch_template" "pool" {
  for_each               = var.pools
  name                   = "${var.name}-${each.key}"
  instance_type          = each.value.shape
  update_default_version = true
  vpc_security_group_ids = [
    aws_eks_cluster.this.vpc_config[0].cluster_security_group_id,
    var.network.fsx_security_group_id,
  ]

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1 # pods, one hop further, get no credentials of the node, but have identities of their own
  }

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_type           = "gp3"
      volume_size           = each.value.volume_gib
      encrypted             = true
      kms_key_id            = var.key_arn
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume", "network-interface"])
    content {
      resource_type = tag_specifications.value
      tags          = merge(var.tags, { Name = "${var.name}-${each.key}" })
    }
  }
}

resource "aws_eks_node_group" "pool" {
  for_each        = var.pools
  cluster_name    = aws_eks_cluster.this.name
  node_group_name = each.key
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [var.network.nodes_subnet_id]
  version         = aws_eks_cluster.this.version
  release_version = var.ami_release # otherwise each new group has the newest release of its day
  ami_type        = "AL2023_x86_64_STANDARD"
  labels          = each.value.labels

  launch_template {
    id      = aws_launch_template.pool[each.key].id
    version = aws_launch_template.pool[each.key].latest_version
  }

  scaling_config {
    desired_size = each.value.nodes
    min_size     = each.value.min_nodes
    max_size     = each.value.max_nodes
  }

  update_config {
    max_unavailable = 1
  }

  node_repair_config {
    enabled = true
  }

  lifecycle {
    ignore_changes = [scaling_config[0].desired_size] # deployments change it
  }

  # Without a CNI nodes stay NotReady until EKS gives up on the group.
  depends_on = [aws_iam_role_policy_attachment.node, aws_eks_addon.before_nodes, terraform_data.routes]
}

resource "terraform_data" "routes" {
  input = var.network.routes
}
